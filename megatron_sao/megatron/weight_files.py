"""The safetensors files of a model directory: found, opened, and checked by name, shape and type."""

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_sao.megatron.mapping.architectures import ARCHITECTURES, read_hf_config
from megatron_sao.megatron.mapping.hf_config import HFConfig, Role
from megatron_sao.megatron.mapping.table import Carried, Shape, carried

WEIGHTS, INDEX, VALUE_HEAD_FILE = "model.safetensors", "model.safetensors.index.json", "value_head.safetensors"
_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Reader:
    """The safetensors files of one model directory, opened (so their headers are whole) and checked by name."""

    def __init__(self, directory: Path, config: HFConfig, stack: ExitStack) -> None:
        self.directory, self.config = directory, config
        self._files: dict[str, Any] = {}  # tensor name -> open file that holds it
        self._paths: dict[str, Path] = {}
        for path in _weight_files(directory, config.role):
            file = stack.enter_context(_open(path))
            for name in file.keys():  # noqa: SIM118 - an open safetensors file is no mapping
                self._files[name], self._paths[name] = file, path

    def tensor(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)  # type: ignore[no-any-return]

    @property
    def lacks_prediction(self) -> bool:
        """Whether config.json promises layers of multi-token prediction and no tensor of them is there: so does
        transformers save a model."""
        first = self.config.num_layers
        layers = {f"model.layers.{first + index}." for index in range(self.config.num_mtp_layers)}
        return bool(layers) and not any(name.startswith(tuple(layers)) for name in self._files)

    def carried(self) -> tuple[Carried, ...]:
        """Those that are there. Raises ValueError for others that must be."""
        known = carried(ARCHITECTURES[self.config.architecture], self.config)
        if self.lacks_prediction:
            known = tuple(each for each in known if each.layer < self.config.num_layers)
        missing = [each for each in known if each.name not in self._files and not each.optional]
        if missing:
            raise ValueError(
                f"{self.directory} lacks {_list([each.name for each in missing])}, which its config.json promises: "
                "copy the whole model directory (layers of multi-token prediction are there as a whole or not at all)"
            )
        return tuple(each for each in known if each.name in self._files)

    def path(self, name: str) -> Path:
        return self._paths[name]

    def check(self, wanted: Mapping[str, Shape], *, skipped: bool) -> None:
        """Names, shapes and types of all tensors, carried ones too. `skipped`: `lm_head.weight` is there and left out.

        Raises:
            ValueError: what is missing, and what is there that no table names.
        """
        wanted = {**wanted, **{tensor.name: tensor.shape for tensor in self.carried()}}
        extra = set(self._files) - wanted.keys()
        if self.config.tied_embeddings and _LM_HEAD in extra:
            self._check_tied()
            extra.discard(_LM_HEAD)
        if skipped and self.config.role == "policy":
            extra.discard(_LM_HEAD)
        missing = wanted.keys() - set(self._files)
        if extra or missing:
            raise ValueError(
                f"{self.directory}: tensors that {self.config.architecture} needs and that are missing: "
                f"{_list(missing)}; tensors that it does not have: {_list(extra)}"
            )
        for name, shape in wanted.items():
            self.dtype(name, shape)

    def dtype(self, name: str, shape: Shape) -> torch.dtype:
        """Type of a tensor that must have that shape."""
        found = self._files[name].get_slice(name)
        found_shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if found_shape != shape or dtype not in _FLOATS:
            raise ValueError(
                f"{self.directory}: {name} is {dtype} {list(found_shape)}; config.json says {list(shape)}, and the "
                f"type must be one of {', '.join(_FLOATS)}"
            )
        return _FLOATS[dtype]

    def _check_tied(self) -> None:
        if not torch.equal(self.tensor(_LM_HEAD), self.tensor(_EMBEDDING)):
            raise ValueError(
                f"{self.directory}: config.json ties the embeddings, but {_LM_HEAD} differs from {_EMBEDDING}"
            )


def _weight_files(directory: Path, role: Role) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files: {error!r}") from error
    else:
        names = [WEIGHTS]
    paths = [directory / name for name in [*names, *([VALUE_HEAD_FILE] if role == "critic" else [])]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"{directory} lacks the weight files {', '.join(missing)}: copy the whole model directory")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error


def _list(names: Collection[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return (", ".join(ordered[:8]) + more) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedTensor:
    """A tensor that is not in the model, where it lies. Every read opens its file anew: nothing is kept."""

    name: str
    shape: Shape
    dtype: torch.dtype  # on disk, whatever the model's is
    path: Path
    in_engine: bool  # an indexer: an engine holds it; of the layers after the last one it holds none

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        with _open(self.path) as file:
            return file.get_tensor(self.name)  # type: ignore[no-any-return]


def carried_tensors(directory: Path) -> tuple[CarriedTensor, ...]:
    """What a policy's directory has beside the model. Raises ValueError as `Reader.carried`."""
    config = read_hf_config(directory)
    if not carried(ARCHITECTURES[config.architecture], config):  # every rank would open every file for nothing
        return ()
    with ExitStack() as stack:
        reader = Reader(directory, config, stack)
        return tuple(
            CarriedTensor(
                name=each.name,
                shape=each.shape,
                dtype=reader.dtype(each.name, each.shape),
                path=reader.path(each.name),
                in_engine=each.layer < config.num_layers,
            )
            for each in reader.carried()
        )
