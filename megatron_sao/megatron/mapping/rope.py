"""Rotary embeddings as `config.json` says them, in transformers 4's form (top level, `rope_scaling`) or 5's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Stretched frequencies (arXiv 2309.00071), by the names of the HF fields."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float  # also scales the softmax


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    theta: float
    fraction: float = 1.0  # of the head that is rotated
    yarn: Yarn | None = None


def plain(data: Mapping[str, Any]) -> Rope:
    """Raises ValueError: no rope_theta or several, or any scaling."""
    return Rope(theta=float(_read(data, "default", ("rope_theta",))["rope_theta"]))


def partial(data: Mapping[str, Any]) -> Rope:
    """The first part of each head is rotated. Raises ValueError as `plain`."""
    found = _read(data, "default", ("rope_theta", "partial_rotary_factor"))
    return Rope(theta=float(found["rope_theta"]), fraction=float(found["partial_rotary_factor"]))


def plain_or_yarn(data: Mapping[str, Any]) -> Rope:
    """Raises ValueError: a field of YaRN is missing, or another scaling."""
    parts = [data.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if all(part.get("rope_type", part.get("type", "default")) == "default" for part in parts):
        return plain(data)
    found = _read(data, "yarn", ("rope_theta", *_YARN))
    return Rope(theta=float(found["rope_theta"]), yarn=Yarn(**{to: found[name] for name, to in _YARN.items()}))


def _read(data: Mapping[str, Any], kind: Literal["default", "yarn"], names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default"}
    top = {name: data[name] for name in ("rope_theta", "partial_rotary_factor") if data.get(name) is not None}
    for part in (top, data.get("rope_scaling") or {}, data.get("rope_parameters") or {}):
        for name, value in part.items():
            known = "rope_type" if name == "type" else name
            if known in found and found[known] != value and known != "rope_type":
                raise ValueError(
                    f"one {known} is needed (top level or in rope_parameters), not {found[known]}, {value}"
                )
            found[known] = value
    if "rope_theta" not in found:
        raise ValueError("one rope_theta is needed (top level or in rope_parameters); there is none")
    wrong = found["rope_type"] != kind or found.keys() != {"rope_type", *names}
    if wrong or not all(isinstance(found[name], int | float) for name in names):
        raise ValueError(
            f"RoPE scaling {found} is not implemented; implemented: rope_type {kind} with {', '.join(names)}"
        )
    return found
