"""The same routing by transformers: which experts its routers choose, and what it computes with other ones."""

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.support.tiny_models import load_hf


def routers(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def chosen_by_hf(directory: Path | str, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int16]]:
    """[T, layers with experts, K] of each sequence."""
    model, found = load_hf(directory), []
    for router in routers(model):
        router.register_forward_hook(lambda _, __, output: found[-1].append(output[2]))
    for token_ids in sequences:
        found.append([])
        with torch.no_grad():
            model(torch.from_numpy(token_ids.astype(np.int64))[None])
    return [torch.stack(layers, dim=1).numpy().astype(np.int16) for layers in found]


def force(model: Any, ids: NDArray[np.int16]) -> None:
    """From now on every router takes `ids` [T, layers, K], its own choice where they are -1."""
    for place, router in enumerate(routers(model)):
        router.recorded = torch.from_numpy(ids[:, place].astype(np.int64))
        router.forward = types.MethodType(_forced, router)


def _forced(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As Qwen3MoeTopKRouter.forward, with given experts: softmax over all, the chosen ones' shares, normalised."""
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    shares = logits.softmax(-1)
    chosen = torch.where(router.recorded < 0, shares.topk(router.top_k).indices, router.recorded)
    weights = shares.gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen
