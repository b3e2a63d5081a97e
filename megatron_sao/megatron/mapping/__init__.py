"""HF names and Megatron-core shards: tables per architecture, and moving tensors between the two."""

from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.mapping.transfer import HFTensor, MappedModel, gather, hf_tensors, parameter_hf_names

__all__ = ["HFConfig", "HFTensor", "MappedModel", "gather", "hf_tensors", "parameter_hf_names"]
