"""What a model's `config.json` says, as one record for all architectures."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_sao.megatron.mapping.rope import Rope

Role = Literal["policy", "critic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HFConfig:
    """A HF `config.json`: sizes and the few choices that change the computation. Sizes are those of the whole model."""

    architecture: str  # "Qwen3MoeForCausalLM"
    role: Role  # "critic": exported by this package, with a value head instead of lm_head
    dtype: str | None  # of the checkpoint, "bfloat16"
    quantization: str | None = None  # "fp8": such weights are not read
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    is_moe_layer: tuple[bool, ...]  # [num_layers]
    ffn_size: int  # of a dense layer
    # grouped-query attention
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    # latent attention (MLA); kv_lora_rank 0: the model has the other kind
    q_lora_rank: int = 0  # 0: queries are not compressed
    kv_lora_rank: int = 0
    nope_head_dim: int = 0  # of queries and keys, without position
    rope_head_dim: int = 0
    value_head_dim: int = 0
    # sparse attention (DSA): an indexer chooses index_topk tokens; layers without one use the last choice
    index_topk: int = 0
    index_num_heads: int = 0
    index_head_dim: int = 0
    has_indexer: tuple[bool, ...] = ()  # [num_layers]
    computes_sparse: bool = False  # Megatron does so here; else it computes dense attention, and carries the indexers
    # experts
    num_experts: int = 0  # 0: no layer has experts
    expert_ffn_size: int = 0
    experts_per_token: int = 0
    renormalize_top_k: bool = True  # the chosen experts' weights sum to 1
    routed_scale: float = 1.0  # then multiplied by this
    num_shared_experts: int = 0  # that every token visits, as one MLP
    num_router_groups: int = 1
    groups_per_token: int = 1  # the chosen experts lie in so many groups
    num_mtp_layers: int = 0  # multi-token prediction, after the last layer: on disk, not in the model
    raw: Mapping[str, Any] = field(compare=False, repr=False)  # the file

    @property
    def may_start_stage(self) -> tuple[bool, ...]:
        """[num_layers] Megatron hands no indexer's choice from one pipeline stage to the next."""
        return self.has_indexer if self.computes_sparse else (True,) * self.num_layers

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension that the tensor tables name."""
        return {
            "1": 1,
            "hidden": self.hidden_size,
            "2 hidden": 2 * self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
            "q_lora": self.q_lora_rank,
            "latent_q": self.num_heads * (self.nope_head_dim + self.rope_head_dim),
            "kv_lora": self.kv_lora_rank,
            "kv_lora_rope": self.kv_lora_rank + self.rope_head_dim,
            "latent_kv": self.num_heads * (self.nope_head_dim + self.value_head_dim),
            "latent_values": self.num_heads * self.value_head_dim,
            "index_q": self.index_num_heads * self.index_head_dim,
            "index_head": self.index_head_dim,
            "index_heads": self.index_num_heads,
            "vocab": self.vocab_size,
            "ffn": self.ffn_size,
            "expert_ffn": self.expert_ffn_size,
            "shared_ffn": self.num_shared_experts * self.expert_ffn_size,
            "experts": self.num_experts,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """An attribute of HFConfig that one or several fields give by a rule. `read` raises ValueError for a bad value."""

    attribute: str
    fields: tuple[str, ...]  # that may be in the file
    read: Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFields:
    """Which fields of `config.json` an architecture has, and what is done with each. Any other field is an error."""

    used: Mapping[str, str]  # HF name -> attribute of HFConfig
    optional: frozenset[str] = frozenset()  # of the used ones: may be absent
    derived: tuple[Derived, ...]
    fixed: Mapping[str, tuple[Any, ...]]  # HF name -> accepted values; absent is accepted
    inert: frozenset[str]  # without effect on training here
    layer_type: str = "full_attention"  # of every layer, where layer_types is given

    @property
    def known(self) -> frozenset[str]:
        by_rule = frozenset(name for each in self.derived for name in each.fields)
        return frozenset(self.used) | frozenset(self.fixed) | self.inert | by_rule | _HANDLED


_HANDLED = frozenset(  # read by `parse` for every architecture
    {"architectures", "role", "dtype", "torch_dtype", "layer_types", "quantization_config"}
)
_ALIASES = {"num_local_experts": "num_experts"}  # transformers 5 writes the left one
_MAY_BE_ZERO = ("num_mtp_layers",)


def read_json(directory: Path) -> dict[str, Any]:
    """The raw `config.json` of a model directory.

    Raises:
        ValueError: the directory or the file is missing, or it is not a JSON object.
    """
    path = directory / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{directory} is no model directory: cannot read {path.name} ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not an object")
    return data


def architecture_of(raw: Mapping[str, Any], source: Path, supported: Mapping[str, Any]) -> str:
    """Name of the architecture; an unsupported one is a ValueError that lists the supported ones."""
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in supported:
        raise ValueError(f"{source}: architecture {names} is not supported; supported: {', '.join(sorted(supported))}")
    return str(names[0])


def parse(raw: Mapping[str, Any], *, source: Path, fields: ConfigFields) -> HFConfig:
    """Check every field of `raw` against what the architecture knows, and build the record.

    Raises:
        ValueError: unknown field, missing field, value of the wrong type, or a choice that is not implemented.
    """
    data = {_ALIASES.get(name, name): value for name, value in raw.items()}
    try:
        _check_names(data, fields)
        values: dict[str, Any] = {attribute: data[name] for name, attribute in fields.used.items() if name in data}
        for name, attribute in fields.used.items():
            if name in data:
                _check_type(name, data[name], attribute)
        values |= {each.attribute: each.read(data) for each in fields.derived}
        role = _role(data)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return HFConfig(
        architecture=data["architectures"][0],
        role=role,
        dtype=data.get("dtype") or data.get("torch_dtype"),
        quantization=_quantization(data),
        raw=dict(raw),
        **values,
    )


def _check_names(data: Mapping[str, Any], fields: ConfigFields) -> None:
    unknown = sorted(data.keys() - fields.known)
    if unknown:
        raise ValueError(
            f"unknown config fields {', '.join(unknown)}: what they would change is not implemented; "
            f"known: {', '.join(sorted(fields.known))}"
        )
    missing = sorted(fields.used.keys() - data.keys() - fields.optional)
    if missing:
        raise ValueError(f"missing config fields {', '.join(missing)}")
    for name, accepted in fields.fixed.items():
        if name in data and data[name] not in accepted:
            raise ValueError(f"{name} = {data[name]!r} is not implemented; implemented: {list(accepted)}")
    kinds = set(data.get("layer_types") or ())
    if kinds - {fields.layer_type}:
        raise ValueError(f"layer_types {sorted(kinds)}: only {fields.layer_type} is implemented")


def _check_type(name: str, value: Any, attribute: str) -> None:
    wanted = HFConfig.__annotations__[attribute]
    accepted = {int: (int,), float: (int, float), bool: (bool,)}[wanted]
    is_bool = isinstance(value, bool)
    least = 0 if attribute in _MAY_BE_ZERO else 1
    if not isinstance(value, accepted) or is_bool is not (wanted is bool) or (wanted is int and value < least):
        raise ValueError(f"{name} = {value!r} must be a positive {wanted.__name__}")


def _role(data: Mapping[str, Any]) -> Role:
    role = data.get("role", "policy")
    if role not in ("policy", "critic"):
        raise ValueError(f"role = {role!r} must be policy or critic")
    return role  # type: ignore[no-any-return]


def _quantization(data: Mapping[str, Any]) -> str | None:
    quantization = data.get("quantization_config")
    return None if quantization is None else str(quantization.get("quant_method", "of an unnamed kind"))
