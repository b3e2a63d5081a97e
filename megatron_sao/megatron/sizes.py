"""What the sizes of a layout must divide in a model. Pure. (A vocabulary is padded.)"""

from megatron_sao.config import divisors
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.mapping.table import padded_vocabulary
from megatron_sao.megatron.stages import stage_layers


def check_sizes(hf: HFConfig, *, tensor: int, expert: int = 1, expert_tensor: int = 1, num_stages: int = 1) -> None:
    """Raises ValueError for sizes that do not divide the model's, with those that would."""
    dense = {"attention heads": hf.num_heads}
    if not all(hf.is_moe_layer):
        dense["feed-forward size"] = hf.ffn_size
    if hf.num_shared_experts:
        dense["shared experts' size"] = hf.sizes["shared_ffn"]
    for what, size in dense.items():
        _check_divides("tensor", tensor, what, size)
    if (tensor - 1) * (padded_vocabulary(hf.vocab_size, tensor) // tensor) >= hf.vocab_size:
        raise ValueError(f"tensor = {tensor} leaves a rank without one of the vocabulary's {hf.vocab_size} ids")
    if hf.num_kv_heads % tensor and tensor % hf.num_kv_heads:
        raise ValueError(
            f"tensor = {tensor} is neither a divisor nor a multiple of the {hf.num_kv_heads} key-value heads"
        )
    for name, count in (("expert", expert), ("expert_tensor", expert_tensor)):
        if count > 1 and not hf.num_experts:
            raise ValueError(f"{name} = {count}, but {hf.architecture} has no experts: {name} = 1 is the only choice")
    _check_divides("expert", expert, "experts", hf.num_experts)
    _check_divides("expert_tensor", expert_tensor, "experts' feed-forward size", hf.expert_ffn_size)
    stage_layers(hf.may_start_stage, num_stages)


def _check_divides(name: str, count: int, what: str, size: int) -> None:
    if size % count:
        raise ValueError(f"{name} = {count} does not divide the {what}, {size}: {divisors(size)} would")
