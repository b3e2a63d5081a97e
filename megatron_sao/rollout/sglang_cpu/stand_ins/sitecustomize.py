"""Read by every Python process of a CPU server, before anything else: two packages whose names import and do nothing.

`sgl_kernel`: sglang's CPU kernels, which are not on PyPI. `torchvision`: for image models, of which none is served;
its PyPI wheel does not load beside a CPU build of torch, so it is not installed. Any submodule and any name can be
imported from both; whoever calls one is told.
"""

import sys
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

VERSIONS = {"sgl_kernel": "0.4.10", "torchvision": "0.0"}


class Absent:
    """A name of a package that is not there. Its attributes are of the same kind (and stay the same objects)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "Absent":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        value = Absent(f"{self._name}.{attribute}")
        setattr(self, attribute, value)
        return value

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} was called, and is only a name in a server that runs on a CPU")

    def __or__(self, _: Any) -> Any:  # in annotations
        return Any

    __ror__ = __or__


class AbsentPackages(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in VERSIONS else None

    def exec_module(self, module: ModuleType) -> None:
        names = Absent(module.__name__)
        module.__getattr__ = partial(getattr, names)  # type: ignore[method-assign]
        module.__dict__["__version__"] = VERSIONS[module.__name__.partition(".")[0]]


sys.meta_path.insert(0, AbsentPackages())
