"""HF directories in and out: safetensors under HF names, config.json, tokenizer files.

A critic's directory is a policy's without `lm_head.weight`, with `value_head.safetensors` and `"role": "critic"` in
its config.json. Tensors that are not in the model (indexers, multi-token prediction) are checked when a policy is
loaded and copied as they are when it is exported; a critic's directory has none. Layers of multi-token prediction may
be missing as a whole.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.mapping.hf_config import HFConfig, Role, read_json
from megatron_sao.megatron.mapping.rows import VALUE_HEAD
from megatron_sao.megatron.mapping.table import Binding, Shape
from megatron_sao.megatron.mapping.transfer import (
    MappedModel,
    bindings_of,
    gather,
    hf_tensors,
    is_local,
    named_tensors,
    shard_place,
)
from megatron_sao.megatron.parallel import Parallel
from megatron_sao.megatron.weight_files import INDEX, VALUE_HEAD_FILE, WEIGHTS, Reader, carried_tensors

LOG = logging.getLogger(__name__)
MAX_FILE_BYTES = 4 * 1024**3
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
    wanted = {tensor.name: tensor.shape for tensor in hf_tensors(model, parallel)}
    if source.role == "policy":
        wanted.pop(VALUE_HEAD, None)
    with ExitStack() as stack:
        reader = Reader(directory, source, stack)
        reader.check(wanted, skipped=role == "critic")
        if parallel.rank == 0 and role == "policy" and reader.lacks_prediction:
            LOG.info(
                "%s has no tensor of its config.json's %d layers of multi-token prediction (transformers saves none): "
                "it is exported without them too",
                directory,
                source.num_mtp_layers,
            )
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


def _fill(model: MappedModel, parallel: Parallel, reader: Reader, wanted: Mapping[str, Shape]) -> None:
    parameters = named_tensors(model)
    with torch.no_grad():
        for binding in bindings_of(model, parallel):
            if is_local(binding, model.hf_config, parallel) and binding.hf_names[0] in wanted:
                _fill_one(binding, parameters[binding.find(parameters)], parallel, reader)


def _fill_one(binding: Binding, parameter: Tensor, parallel: Parallel, reader: Reader) -> None:
    rank, size = shard_place(binding, parallel)
    pieces = binding.layout.cut(parameter, reader.config, rank=rank, size=size)
    if sum(piece.numel() for piece in pieces) < parameter.numel():
        parameter.zero_()  # padding, which no gradient and no weight decay moves from there
    for part, (name, piece) in enumerate(zip(binding.hf_names, pieces, strict=True)):
        source = binding.layout.place(reader.tensor(name), reader.config, part=part, rank=rank, size=size)
        assert piece.shape == source.shape, f"{name}: {tuple(piece.shape)} is not {tuple(source.shape)}"
        piece.copy_(source)


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
            _write_weights(model, parallel, directory, source, dtype=dtype, max_file_bytes=max_file_bytes)
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
    sizes = {
        tensor.name: torch.Size(tensor.shape).numel() * tensor.exported(dtype).itemsize
        for tensor in hf_tensors(model, parallel)
        if tensor.name != VALUE_HEAD
    }
    return _split(sizes, max_file_bytes)


def _split(sizes: Mapping[str, int], max_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for name, num_bytes in sizes.items():
        if names and total + num_bytes > max_bytes:
            yield names
            names, total = [], 0
        names.append(name)
        total += num_bytes
    if names:
        yield names


def _write_weights(
    model: MappedModel,
    parallel: Parallel,
    directory: Path,
    source: Path,
    *,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    is_critic = model.hf_config.role == "critic"
    beside = {} if is_critic else {tensor.name: tensor for tensor in carried_tensors(source)}
    files = list(_files_of(model, parallel, dtype, max_file_bytes))
    num_gathered = len(files)
    files += _split({name: tensor.num_bytes for name, tensor in beside.items()}, max_file_bytes)
    place: dict[str, str] = {}
    total_bytes = 0
    for i, names in enumerate(files):
        file = WEIGHTS if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        is_gathered = i < num_gathered
        tensors = (
            gather(model, parallel, names, dtype) if is_gathered else {name: beside[name].read() for name in names}
        )
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        place |= dict.fromkeys(names, file)
        _save(tensors, directory / file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": place}
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    head = gather(model, parallel, [VALUE_HEAD] if is_critic else [])
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
