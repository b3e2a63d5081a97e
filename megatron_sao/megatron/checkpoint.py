"""HF directories in and out: safetensors under HF names, config.json, tokenizer files.

A critic's directory is a policy's without `lm_head.weight`, with `value_head.safetensors` and `"role": "critic"` in
its config.json.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.mapping.hf_config import HFConfig, Role, read_json
from megatron_sao.megatron.mapping.rows import VALUE_HEAD
from megatron_sao.megatron.mapping.table import Binding
from megatron_sao.megatron.mapping.transfer import (
    HFTensor,
    MappedModel,
    bindings_of,
    gather,
    hf_tensors,
    is_local,
    shard_place,
)
from megatron_sao.megatron.parallel import Parallel

WEIGHTS, INDEX, VALUE_HEAD_FILE = "model.safetensors", "model.safetensors.index.json", "value_head.safetensors"
MAX_FILE_BYTES = 4 * 1024**3
_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FLOATS = ("F32", "F16", "BF16")
_COPIED = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


def load_policy(model: MappedModel, directory: Path | str, parallel: Parallel) -> None:
    """Fill the policy from a HF directory; each rank reads what it holds. No communication.

    Raises:
        ValueError: not a policy's directory, another config than the model's, a file missing or truncated, a tensor
            missing, unknown, or of another shape or type.
    """
    _load(model, Path(directory), parallel, role="policy")


def load_critic(model: MappedModel, directory: Path | str, parallel: Parallel) -> None:
    """Fill the critic: from a policy's directory everything but the value head (which stays as built), leaving out
    exactly `lm_head.weight`; from an exported critic's directory everything.

    Raises:
        ValueError: as `load_policy`.
    """
    _load(model, Path(directory), parallel, role="critic")


def _load(model: MappedModel, directory: Path, parallel: Parallel, *, role: Role) -> None:
    config = model.hf_config
    assert config.role == role, f"a {config.role} is loaded as a {role}"
    source = read_hf_config(directory)
    _check_same_model(source, config, directory)
    wanted = {tensor.name: tensor for tensor in hf_tensors(model, parallel)}
    if source.role == "policy":
        wanted.pop(VALUE_HEAD, None)
    with ExitStack() as stack:
        reader = _Reader(directory, source, stack)
        reader.check(wanted, skipped=role == "critic")
        _fill(model, parallel, reader, wanted)


def _check_same_model(source: HFConfig, config: HFConfig, directory: Path) -> None:
    if config.role == "policy" and source.role != "policy":
        raise ValueError(f"{directory} holds a {source.role}: a policy is loaded from a policy's directory only")
    differing = [
        f"{name} = {getattr(source, name)} (model: {getattr(config, name)})"
        for name in HFConfig.__annotations__
        if name not in ("raw", "role", "dtype") and getattr(source, name) != getattr(config, name)
    ]
    if differing:
        raise ValueError(f"{directory} is of another model: {', '.join(differing)}")


def _fill(model: MappedModel, parallel: Parallel, reader: "_Reader", wanted: Mapping[str, HFTensor]) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for binding in bindings_of(model, parallel):
            if is_local(binding, model.hf_config, parallel) and binding.hf_names[0] in wanted:
                _fill_one(binding, parameters[binding.find(parameters)], parallel, reader)


def _fill_one(binding: Binding, parameter: Tensor, parallel: Parallel, reader: "_Reader") -> None:
    rank, size = shard_place(binding, parallel)
    pieces = binding.layout.cut(parameter, reader.config, rank=rank, size=size)
    for part, (name, piece) in enumerate(zip(binding.hf_names, pieces, strict=True)):
        source = binding.layout.place(reader.tensor(name), reader.config, part=part, rank=rank, size=size)
        assert piece.shape == source.shape, f"{name}: {tuple(piece.shape)} is not {tuple(source.shape)}"
        piece.copy_(source)


class _Reader:
    """The safetensors files of one model directory, opened (so their headers are whole) and checked by name."""

    def __init__(self, directory: Path, config: HFConfig, stack: ExitStack) -> None:
        self.directory, self.config = directory, config
        self._files: dict[str, Any] = {}  # tensor name -> open file that holds it
        for path in _weight_files(directory, config.role):
            file = stack.enter_context(_open(path))
            for name in file.keys():  # noqa: SIM118 - an open safetensors file is no mapping
                self._files[name] = file

    def tensor(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)  # type: ignore[no-any-return]

    def check(self, wanted: Mapping[str, HFTensor], *, skipped: bool) -> None:
        """Names, shapes and types of all tensors. `skipped`: `lm_head.weight` is there and left out."""
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
        for name, tensor in wanted.items():
            self._check_tensor(name, tensor)

    def _check_tensor(self, name: str, tensor: HFTensor) -> None:
        found = self._files[name].get_slice(name)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if shape != tensor.shape or dtype not in _FLOATS:
            raise ValueError(
                f"{self.directory}: {name} is {dtype} {list(shape)}; config.json says {list(tensor.shape)}, and the "
                f"type must be one of {', '.join(_FLOATS)}"
            )

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


def _list(names: Sequence[str] | set[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return (", ".join(ordered[:8]) + more) or "none"


def export(
    model: MappedModel,
    source_directory: Path | str,
    target_directory: Path | str,
    parallel: Parallel,
    *,
    role: Role,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the model as a HF directory, all at once: into a temporary neighbour, then renamed. Collective.

    config.json and the tokenizer files come from `source_directory`; `dtype` None keeps the model's types. An earlier
    export at the target is replaced. Returns on all ranks after the rename.

    Raises:
        ValueError: the target exists and is no model directory, or it is the source.
    """
    assert model.hf_config.role == role, f"a {model.hf_config.role} is exported as a {role}"
    source, target = Path(source_directory), Path(target_directory)
    _check_target(source, target)
    if parallel.rank != 0:
        for names in _files_of(model, parallel, dtype, max_file_bytes):
            gather(model, parallel, names, dtype)
        gather(model, parallel, [VALUE_HEAD] if role == "critic" else [])
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
            directory = Path(name) / target.name
            directory.mkdir()
            _write_weights(model, parallel, directory, dtype=dtype, max_file_bytes=max_file_bytes)
            _write_config(directory, source, role, dtype or _dtype_of(model, parallel))
            _rename(directory, target, Path(name) / "replaced")
    dist.barrier()


def _check_target(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise ValueError(f"the export would overwrite the model it started from, {source}: choose another directory")
    if target.exists() and not (target / "config.json").is_file() and not _is_empty(target):
        raise ValueError(f"{target} exists and is no model directory: remove it, or export to another place")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _dtype_of(model: MappedModel, parallel: Parallel) -> torch.dtype:
    return hf_tensors(model, parallel)[0].dtype


def _files_of(
    model: MappedModel, parallel: Parallel, dtype: torch.dtype | None, max_file_bytes: int
) -> Iterator[list[str]]:
    """Names of the backbone's tensors, file by file; the same on all ranks."""
    names: list[str] = []
    total = 0
    for tensor in hf_tensors(model, parallel):
        if tensor.name == VALUE_HEAD:
            continue
        num_bytes = torch.Size(tensor.shape).numel() * (dtype or tensor.dtype).itemsize
        if names and total + num_bytes > max_file_bytes:
            yield names
            names, total = [], 0
        names.append(tensor.name)
        total += num_bytes
    yield names


def _write_weights(
    model: MappedModel, parallel: Parallel, directory: Path, *, dtype: torch.dtype | None, max_file_bytes: int
) -> None:
    files = list(_files_of(model, parallel, dtype, max_file_bytes))
    place: dict[str, str] = {}
    total_bytes = 0
    for i, names in enumerate(files, start=1):
        file = WEIGHTS if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        tensors = gather(model, parallel, names, dtype)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        place |= dict.fromkeys(names, file)
        _save(tensors, directory / file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": place}
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    head = gather(model, parallel, [VALUE_HEAD] if model.hf_config.role == "critic" else [])
    if head:
        _save(head, directory / VALUE_HEAD_FILE)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode  # the user's usual one; safetensors makes its files private
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(mode)


def _write_config(directory: Path, source: Path, role: Role, dtype: torch.dtype) -> None:
    raw = read_json(source)
    raw.pop("role", None)
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    raw[key] = str(dtype).removeprefix("torch.")
    if role == "critic":
        raw["role"] = role
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)


def _rename(directory: Path, target: Path, replaced: Path) -> None:
    if target.exists():
        target.rename(replaced)  # removed with the temporary directory
    directory.rename(target)
