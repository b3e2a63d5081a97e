"""What the ranks of the router replay's tests run. No transformers here: a rank must start fast."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from numpy.typing import NDArray
from torch import Tensor

from megatron_sao.data.routed_experts import ExpertReader, RouterShape
from megatron_sao.megatron.forward import MicroBatch, _call, make_micro_batches, run_training
from megatron_sao.megatron.mapping.transfer import gather, hf_tensors
from megatron_sao.megatron.output_layer import Sums, loss_of_states
from megatron_sao.megatron.parallel import initialize
from megatron_sao.megatron.platform import install
from megatron_sao.megatron.router_replay import RouterReplay, _LayerReplay
from megatron_sao.megatron.shard import Shard
from megatron_sao.megatron.step import Trainer, logprobs, score
from tests.support.training_case import Case, make_batch, make_trainer, shard_of

LAYERS = (0, 2, 3)  # that have experts
Routes = NDArray[np.int16] | None
"""[T of the batch, layers with experts, K], -1 where the router chooses; None: no replay."""


def weights_of(num_actions: int) -> NDArray[np.float32]:
    """[A] what each action's log-prob counts in the loss."""
    return np.random.default_rng(11).uniform(-1, 1, num_actions).astype(np.float32)


def gradients_by_routes(rank: int, directory: str, case: Case, routes: Mapping[str, Routes]) -> dict[str, Any]:
    """For each set of routes: the summed loss of this rank, and the whole model's gradients under HF names."""
    parallel = initialize(case.layout, rank=rank, init_method=None, timeout_s=100, platform=install())
    trainer = make_trainer(directory, case, parallel, "actor")
    replay = RouterReplay(trainer.model.chunks, parallel)
    answers: dict[str, Any] = {"layers": replay.layers}
    for name, ids in routes.items():
        rows = micro_batches(trainer, case, None if ids is None else ids[:, [LAYERS.index(n) for n in replay.layers]])
        parts = run_training(trainer.model, rows, loss_of(trainer), trainer.platform)
        answers[name] = float(sum(part["loss"] for part in parts)), gradients(trainer)
    if parallel.world_size == 1:
        answers["kinds"] = kinds_of_router(replay)
        answers["in flight"] = in_flight(trainer, micro_batches(trainer, case, routes["other"]))
    return answers


def micro_batches(trainer: Trainer, case: Case, ids: Routes) -> tuple[MicroBatch, ...]:
    batch = make_batch()
    shard, places = shard_of(batch, case, trainer.parallel)
    fields = {name: getattr(shard, name) for name in Shard.__dataclass_fields__}
    if ids is not None:
        order = [i for row in case.plan[trainer.parallel.data_rank] for i in row]
        cut = [ids[batch.offsets[i] : batch.offsets[i + 1]] for i in order]
        fields["routed_experts"] = np.concatenate([ids[:0], *cut])
    columns = {"weight": weights_of(batch.num_action_tokens)[places]}
    return make_micro_batches(Shard(**fields), columns, parallel=trainer.parallel, platform=trainer.platform)


def loss_of(trainer: Trainer) -> Any:
    def loss(hidden: Tensor, row: MicroBatch) -> tuple[Tensor, list[Sums]]:
        def of_piece(logprobs: Tensor, _: Tensor, piece: slice) -> tuple[Tensor, Sums]:
            total = -(logprobs * row.columns["weight"][piece]).sum()
            return total, {"loss": total.detach().double()}

        return loss_of_states(hidden, row, of_piece, trainer.vocabulary)

    return loss


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Final gradients; the model is left as it was."""
    model = trainer.model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)  # type: ignore[arg-type]
        names = [tensor.name for tensor in hf_tensors(model, trainer.parallel)]
        found = {name: tensor.clone() for name, tensor in gather(model, trainer.parallel, names).items()}
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.copy_(old)
    return found


def in_flight(trainer: Trainer, rows: tuple[MicroBatch, ...]) -> dict[str, Tensor]:
    """Gradients where every forward comes before the first backward, as in a pipeline's warm-up: summed, undivided."""
    (model,) = trainer.model.wrapped
    model.zero_grad_buffer()
    outputs = [_call(model, row, trainer.platform) for row in rows]
    for output, row in zip(outputs, rows, strict=True):
        loss_of(trainer)(output, row)[0].backward()
    return gradients(trainer)


def kinds_of_router(replay: RouterReplay) -> dict[str, bool]:
    """Whether weights and gradients over given experts are those made by hand, for each kind of score."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 8, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(6)])
    sigmoid = {"score_function": "sigmoid", "scaling_factor": 2.5, "num_groups": 4, "group_topk": 1}
    shares = logits.sigmoid().gather(1, ids)
    kinds: dict[str, tuple[dict[str, Any], Tensor]] = {
        "chosen": ({}, logits.gather(1, ids).softmax(-1)),
        "all": ({"use_pre_softmax": True}, logits.softmax(-1).gather(1, ids)),
        "sigmoid": (
            sigmoid | {"expert_bias": torch.randn(8, generator=generator)},
            2.5 * shares / shares.sum(-1, keepdim=True),
        ),
    }
    return {name: _is_by_hand(replay, logits, ids, *kind) for name, kind in kinds.items()}


def _is_by_hand(replay: RouterReplay, logits: Tensor, ids: Tensor, options: Any, wanted: Tensor) -> bool:
    def run() -> Tensor:
        probs, chosen = topk_routing_with_score_function(logits, 2, router_replay=_LayerReplay(replay, 0), **options)
        assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, ids, True))
        return probs

    probs = replay.run(ids[:, None].to(torch.int16), run)
    (found,), (by_hand,) = (torch.autograd.grad((p**2).sum(), logits, retain_graph=True) for p in (probs, wanted))
    return torch.allclose(probs.gather(1, ids), wanted, atol=1e-6) and torch.allclose(found, by_hand, atol=1e-6)


def replayed_logprobs(
    rank: int, directory: str, dtype: str, files: Path, shape: RouterShape, sequences: Mapping[str, NDArray[np.int32]]
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Log-probs [T-1] of each sequence by the actor, with its own routes and with those of its file."""
    case = Case(dtype=dtype)
    parallel = initialize(case.layout, rank=rank, init_method=None, timeout_s=100, platform=install())
    trainer = make_trainer(directory, case, parallel, "actor")
    reader = ExpertReader(directory=files, shape=shape, layers=RouterReplay(trainer.model.chunks, parallel).layers)
    return [(score(trainer, ids), _replayed(trainer, reader, name, ids)) for name, ids in sequences.items()]


def _replayed(trainer: Trainer, reader: ExpertReader, name: str, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    is_action = np.arange(len(ids)) > 0
    experts, num_missing = reader.read([name], [len(ids)])
    shard = Shard(
        offsets=np.array([0, len(ids)]),
        token_ids=ids,
        is_action=is_action,
        rollout_logprobs=np.zeros(len(ids), np.float32),
        version=is_action.astype(np.int32) - 1,
        micro_batches=((0,),),
        num_action_tokens=len(ids) - 1,
        routed_experts=experts,
        num_missing_routed=num_missing,
    )
    return logprobs(trainer, shard)
