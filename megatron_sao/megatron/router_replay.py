"""Router replay (R3): a training forward that takes the experts chosen at rollout, and its own weights for them.

Megatron's routers ask an object for their top-k (`RouterReplay` in megatron-core). Ours stands in its place: it gives
the recorded ids and gathers the training router's own scores over them, so that Megatron normalises and scales those as
ever and the gradient reaches the router. Where no id was recorded the router's own choice stands.

Megatron's object replays lists of ids in the order of calls. Ours binds ids to a micro-batch instead: the forward binds
them, and the gradient of that micro-batch's output binds them again before any layer is recomputed. So it holds with
several micro-batches in flight, in every schedule, with full recomputation and without.
Axis letters: B tokens of one packed row, b those of this tensor-parallel rank, K experts per token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from megatron_sao.megatron.parallel import Parallel
from megatron_sao.types import NOT_RECORDED


class RouterReplay:
    """The routers of one rank's models (its pipeline stages), and the ids of the micro-batch being computed."""

    def __init__(self, models: Sequence[nn.Module], parallel: Parallel) -> None:
        routers = {router.layer_number - 1: router for model in models for router in _routers(model)}
        self.layers = tuple(sorted(routers))  # counted from 0 over the whole model
        self._num_parts = parallel.tensor_size if parallel.sequence_parallel else 1
        self._part = parallel.tensor_rank if parallel.sequence_parallel else 0
        self._device = next(models[0].parameters()).device
        self._ids: Tensor | None = None  # [b, layers, K]
        for place, layer in enumerate(self.layers):
            routers[layer].router_replay = _LayerReplay(self, place)
        for model in models:
            model.router_replay = self  # type: ignore[assignment]

    def run(self, ids: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
        """`forward()` with `ids` [B, layers, K], NOT_RECORDED where a router chooses; None: everywhere.

        They are on the device while their micro-batch is in flight; the last one's until the next is computed.
        """
        own = None
        if ids is not None:  # sequence parallel cuts the row
            own = ids.chunk(self._num_parts)[self._part].to(self._device, non_blocking=True)
        self._ids = own
        output = forward()
        if output.requires_grad:
            output.register_hook(lambda _: setattr(self, "_ids", own))
        return output

    def ids(self, place: int) -> Tensor | None:
        """[b, K] of the layer at `place` of `layers`."""
        return None if self._ids is None else self._ids[:, place]


class _LayerReplay:
    """What one router asks for its top-k, in the place of Megatron's `RouterReplay`."""

    def __init__(self, replay: RouterReplay, place: int) -> None:
        self._replay, self._place = replay, place

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded = self._replay.ids(self._place)
        if recorded is None:
            return values, own
        chosen = torch.where(recorded == NOT_RECORDED, own, recorded.to(own.dtype))
        return scores.gather(1, chosen), chosen


def replaying(model: Any, ids: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
    """`forward()` of a (wrapped) model with `ids` replayed; a model without replay takes none."""
    replay: RouterReplay | None = get_attr_wrapped_model(model, "router_replay")
    assert replay is not None or ids is None, "ids for a model whose routers do not replay"
    return forward() if replay is None else replay.run(ids, forward)


def _routers(model: nn.Module) -> list[TopKRouter]:
    """Of the decoder's layers; a multi-token-prediction layer routes by itself.

    Raises:
        ValueError: a router whose top-k cannot be replaced.
    """
    decoder: Any = model.decoder
    routers = [module for module in decoder.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        if not hasattr(router, "router_replay") or router.config.moe_router_fusion:
            raise ValueError(
                "actor.router_replay = true: this megatron-core's router asks nobody for its top-k (it needs 0.16 or "
                "newer, and moe_router_fusion off)"
            )
    return routers
