"""Benches, found by name: `sao bench NAME` is the module `tools.bench.NAME`.

A bench has `add_arguments(parser)` and `run(options)`, whose report has `show`, `write` and `num_missed`. Names and
first lines are read in the files, for importing one takes seconds.
"""

import ast
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

PACKAGE = "tools.bench"


def benches() -> Mapping[str, str]:
    """First line of the description, by name: of every module of the package that has `add_arguments`."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} is installed with this package"
    sources = sorted(Path(folder) / file for folder in spec.submodule_search_locations or () for file in _files(folder))
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    return {
        name: (ast.get_docstring(tree) or "").partition("\n")[0]
        for name, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "add_arguments" for node in tree.body)
    }


def _files(folder: str) -> list[str]:
    return [path.name for path in Path(folder).glob("*.py")]


def bench(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")
