"""What a model's `config.json` says, as one record for all architectures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["policy", "critic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HFConfig:
    """A HF `config.json`: sizes and the few choices that change the computation. Sizes are those of the whole model."""

    architecture: str  # "Qwen3MoeForCausalLM"
    role: Role  # "critic": exported by this package, with a value head instead of lm_head
    dtype: str | None  # of the checkpoint, "bfloat16"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    is_moe_layer: tuple[bool, ...]  # [num_layers]
    ffn_size: int  # of a dense layer
    num_experts: int = 0  # 0: no layer has experts
    expert_ffn_size: int = 0
    experts_per_token: int = 0
    renormalize_top_k: bool = True  # the chosen experts' weights sum to 1
    raw: Mapping[str, Any] = field(compare=False, repr=False)  # the file

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension that the tensor tables name."""
        return {
            "1": 1,
            "hidden": self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
            "vocab": self.vocab_size,
            "ffn": self.ffn_size,
            "expert_ffn": self.expert_ffn_size,
            "experts": self.num_experts,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFields:
    """Which fields of `config.json` an architecture has, and what is done with each. Any other field is an error."""

    used: Mapping[str, str]  # HF name -> attribute of HFConfig
    optional: frozenset[str] = frozenset()  # of the used ones: may be absent
    fixed: Mapping[str, tuple[Any, ...]]  # HF name -> accepted values; absent is accepted
    inert: frozenset[str]  # without effect on training here

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self.used) | frozenset(self.fixed) | self.inert | _HANDLED.keys()


_HANDLED: Mapping[str, str] = {  # read by `parse` for every architecture
    "architectures": "",
    "role": "",
    "dtype": "",
    "torch_dtype": "",
    "rope_theta": "",
    "rope_parameters": "",
    "rope_scaling": "",
    "layer_types": "",
    "mlp_only_layers": "",
    "decoder_sparse_step": "",
}
_ALIASES = {"num_local_experts": "num_experts"}  # transformers 5 writes the left one


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
    _check_names(data, source, fields)
    values: dict[str, Any] = {attribute: data[name] for name, attribute in fields.used.items() if name in data}
    for name, attribute in fields.used.items():
        if name in data:
            _check_type(name, data[name], attribute, source)
    return HFConfig(
        architecture=data["architectures"][0],
        role=_role(data, source),
        dtype=data.get("dtype") or data.get("torch_dtype"),
        rope_theta=_rope_theta(data, source),
        is_moe_layer=_moe_layers(data, values),
        raw=dict(raw),
        **values,
    )


def _check_names(data: Mapping[str, Any], source: Path, fields: ConfigFields) -> None:
    unknown = sorted(data.keys() - fields.known)
    if unknown:
        raise ValueError(
            f"{source}: unknown config fields {', '.join(unknown)}: what they would change is not implemented; "
            f"known: {', '.join(sorted(fields.known))}"
        )
    missing = sorted(fields.used.keys() - data.keys() - fields.optional)
    if missing:
        raise ValueError(f"{source}: missing config fields {', '.join(missing)}")
    for name, accepted in fields.fixed.items():
        if name in data and data[name] not in accepted:
            raise ValueError(f"{source}: {name} = {data[name]!r} is not implemented; implemented: {list(accepted)}")
    kinds = set(data.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise ValueError(f"{source}: layer_types {sorted(kinds)}: only full_attention is implemented")


def _check_type(name: str, value: Any, attribute: str, source: Path) -> None:
    wanted = HFConfig.__annotations__[attribute]
    accepted = {int: (int,), float: (int, float), bool: (bool,)}[wanted]
    is_bool = isinstance(value, bool)
    if not isinstance(value, accepted) or is_bool is not (wanted is bool) or (wanted is int and value <= 0):
        raise ValueError(f"{source}: {name} = {value!r} must be a positive {wanted.__name__}")


def _role(data: Mapping[str, Any], source: Path) -> Role:
    role = data.get("role", "policy")
    if role not in ("policy", "critic"):
        raise ValueError(f"{source}: role = {role!r} must be policy or critic")
    return role  # type: ignore[no-any-return]


def _rope_theta(data: Mapping[str, Any], source: Path) -> float:
    """`rope_theta` at the top level (transformers 4) or in `rope_parameters` (transformers 5)."""
    parameters = dict(data.get("rope_parameters") or {})
    for scaling in (parameters, dict(data.get("rope_scaling") or {})):
        extra = scaling.keys() - {"rope_theta", "rope_type", "type"}
        kinds = {scaling.get("rope_type", "default"), scaling.get("type", "default")}
        if extra or kinds != {"default"}:
            raise ValueError(f"{source}: RoPE scaling {scaling} is not implemented; implemented: rope_type default")
    found = {float(theta) for theta in (data.get("rope_theta"), parameters.get("rope_theta")) if theta is not None}
    if len(found) != 1:
        raise ValueError(f"{source}: one rope_theta is needed (top level or in rope_parameters), not {sorted(found)}")
    return found.pop()


def _moe_layers(data: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[bool, ...]:
    dense, step = data.get("mlp_only_layers") or (), data.get("decoder_sparse_step", 1)
    has_experts = values.get("num_experts", 0) > 0
    return tuple(has_experts and i not in dense and (i + 1) % step == 0 for i in range(values["num_layers"]))
