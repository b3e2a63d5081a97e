"""The supported architectures, and the reading of `config.json` by their tables."""

from pathlib import Path

from megatron_sao.megatron.mapping.hf_config import HFConfig, architecture_of, parse, read_json
from megatron_sao.megatron.mapping.qwen3 import QWEN3, QWEN3_MOE

ARCHITECTURES = {architecture.name: architecture for architecture in (QWEN3, QWEN3_MOE)}


def read_hf_config(directory: Path | str) -> HFConfig:
    """Read a model directory's `config.json`; the only source of a model's sizes and options.

    Raises:
        ValueError: no such directory or file, not JSON, an unsupported architecture (the supported ones are listed), a
            field that is unknown or missing, a value that is not implemented.
    """
    source = Path(directory)
    raw = read_json(source)
    name = architecture_of(raw, source, ARCHITECTURES)
    return parse(raw, source=source, fields=ARCHITECTURES[name].fields)
