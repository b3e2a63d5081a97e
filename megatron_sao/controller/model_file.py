"""What the controller reads in a model's `config.json`, and what that says about the configuration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_sao.config import Config


def hf_fields(model_directory: Path) -> dict[str, Any]:
    """The model's `config.json`. Raises ValueError: it is not a JSON object."""
    path = model_directory / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__}, not an object")
    return fields


def vocab_size(model_directory: Path) -> int:
    """Of the model, not of the tokenizer, which may have fewer."""
    return int(hf_fields(model_directory)["vocab_size"])


def max_exact_tokens(hf: Mapping[str, Any]) -> int | None:
    """The longest sequence that Megatron computes as a model of this `config.json` does; None: any.

    A sparse attention, which Megatron computes densely, is the same up to its `index_topk` tokens.
    """
    limit = hf.get("index_topk")
    return None if limit is None else int(limit)


def check_sequence_length(config: Config, limit: int | None, *, computes_sparse: bool) -> None:
    """Raises ValueError: the configuration allows sequences above `limit`, whose attention Megatron does not compute,
    and does not say that an approximation is wanted."""
    longest = config.rollout.max_episode_tokens
    exceeds = limit is not None and longest > limit
    if exceeds and not (config.model.approximate_sparse_attention or computes_sparse):
        raise ValueError(
            f"rollout.max_episode_tokens = {longest} exceeds index_topk = {limit} of {config.model.path}: Megatron's "
            "dense attention is exact up to there; lower it, or set model.approximate_sparse_attention = true"
        )
