"""The supported architectures, and the reading of `config.json` by their tables."""

from pathlib import Path

from megatron_sao.megatron.mapping.deepseek_v3 import DEEPSEEK_V3
from megatron_sao.megatron.mapping.glm4_moe import GLM4_MOE
from megatron_sao.megatron.mapping.glm_moe_dsa import GLM_MOE_DSA
from megatron_sao.megatron.mapping.hf_config import HFConfig, architecture_of, parse, read_json
from megatron_sao.megatron.mapping.qwen3 import QWEN3, QWEN3_MOE

ARCHITECTURES = {
    architecture.name: architecture for architecture in (QWEN3, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3, GLM_MOE_DSA)
}


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
