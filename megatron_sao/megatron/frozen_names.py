"""HF names of what is not trained, by glob patterns, and what a trained parameter costs beside itself. Pure."""

import re
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from megatron_sao.megatron.mapping.table import Binding

GRADIENT_BYTES = 4  # of a trained parameter
_EXPERT = re.compile(r"\.experts\.\d+\.")


def frozen_hf_names(bindings: Sequence[Binding], patterns: Sequence[str]) -> frozenset[str]:
    """HF names of the parameters that are never trained, and of those that match. Raises ValueError as `freeze`."""
    parameters = [binding for binding in bindings if not binding.is_buffer]
    frozen = _matching_names([name for binding in parameters for name in binding.hf_names], patterns)
    frozen |= {name for binding in parameters if binding.is_constant for name in binding.hf_names}
    _check_whole(bindings, frozen)
    _check_experts(bindings, frozen)
    return frozen


def adam_bytes(item_bytes: int) -> int:
    """Of a trained parameter: two float32 moments, and a float32 main copy of one that has fewer bytes."""
    return 8 + (4 if item_bytes < 4 else 0)


def _matching_names(names: Sequence[str], patterns: Sequence[str]) -> frozenset[str]:
    matches = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    empty = [pattern for pattern, found in matches.items() if not found]
    if empty:
        raise ValueError(
            f"freeze patterns that match no tensor: {', '.join(map(repr, empty))}; names look like "
            f"{', '.join(_examples(names))}"
        )
    return frozenset(name for found in matches.values() for name in found)


def _examples(names: Sequence[str]) -> list[str]:
    first_layer = [
        name for name in names if ".layers.0." in name and (".experts." not in name or ".experts.0." in name)
    ]
    outside = [name for name in names if ".layers." not in name]
    return [*outside, *first_layer]


def _check_whole(bindings: Sequence[Binding], frozen: frozenset[str]) -> None:
    for binding in bindings:
        cold = [name for name in binding.hf_names if name in frozen]
        if cold and len(cold) < len(binding.hf_names):
            warm = [name for name in binding.hf_names if name not in frozen]
            raise ValueError(
                f"Megatron holds {', '.join(binding.hf_names)} in one tensor; the freeze patterns freeze "
                f"{', '.join(cold)} and train {', '.join(warm)}: give a pattern for all of them or for none"
            )


def _check_experts(bindings: Sequence[Binding], frozen: frozenset[str]) -> None:
    """Transformer Engine computes a layer's experts on a rank as one, and asks only the first whether it is trained:
    the others' gradients would be lost, or computed for nothing, by where the layout puts them."""
    layers: dict[str, list[str]] = defaultdict(list)
    for binding in bindings:
        if binding.expert_rank is not None:
            layers[_EXPERT.sub(".experts.*.", binding.hf_names[0])].append(binding.hf_names[0])
    for pattern, names in layers.items():
        cold = [name for name in names if name in frozen]
        if cold and len(cold) < len(names):
            warm = [name for name in names if name not in frozen]
            raise ValueError(
                f"the freeze patterns freeze {len(cold)} experts of a layer ({cold[0]}) and train {len(warm)} "
                f"({warm[0]}), which Transformer Engine computes as one: give a pattern for all, {pattern}, or for none"
            )
