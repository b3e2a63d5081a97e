"""The longest possible micro-batch, run once before step 0: memory that is too small is known before any rollout.

Forward and backward with a loss that is 0, beside memory of the size of Adam's state and of an actor's publish buckets.
Nothing is different afterwards: weights, counters and random numbers are as before, the gradients are 0. Every rank
calls it; a rank that is out of memory raises, and the others' collectives end with the role's deadlines.
"""

import logging
import time

import numpy as np
import torch
from torch import Tensor

from megatron_sao.config import RoleConfig
from megatron_sao.megatron.forward import MicroBatch, make_micro_batches, run_training
from megatron_sao.megatron.memory import advice, describe, role_memory
from megatron_sao.megatron.output_layer import Sums, loss_of_states
from megatron_sao.megatron.shard import Shard
from megatron_sao.megatron.step import Trainer

LOG = logging.getLogger(__name__)
_NO_CPU_MEMORY = "DefaultCPUAllocator"  # in the RuntimeError that torch raises then
_STRIDE = 7919  # of token ids: prime, so that neighbours differ and all of a vocabulary occur


def rehearse(trainer: Trainer, config: RoleConfig, *, publish_bytes: int = 0) -> None:
    """Run rows of `max_tokens_per_micro_batch` tokens, as many as the pipeline holds at once, beside `publish_bytes`.

    Raises:
        RuntimeError: there is too little memory. It says where, how much was asked for, and what would help.
    """
    started_s = time.monotonic()
    try:
        _run(trainer, config.max_tokens_per_micro_batch, publish_bytes)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _NO_CPU_MEMORY in str(error):
            raise RuntimeError(_explain(trainer, config, publish_bytes, error)) from error
        raise
    LOG.info(
        "the longest micro-batch, %d tokens, fits: %.1f s%s",
        config.max_tokens_per_micro_batch,
        time.monotonic() - started_s,
        f", peak {torch.cuda.max_memory_allocated() / 1024**3:.1f} GiB" if trainer.platform.backend == "nccl" else "",
    )


def _run(trainer: Trainer, num_tokens: int, publish_bytes: int) -> None:
    shard = longest_rows(trainer, num_tokens)
    rows = make_micro_batches(shard, {}, parallel=trainer.parallel, platform=trainer.platform)
    is_critic = trainer.model.hf_config.role == "critic"

    def of_piece(logprobs: Tensor, _: Tensor, __: slice) -> tuple[Tensor, Sums]:
        return (logprobs * 0).sum(), {}

    def loss(output: Tensor, row: MicroBatch) -> tuple[Tensor, list[Sums]]:
        if is_critic:
            return (output[0, row.state_index_a] * 0).sum(), []
        return loss_of_states(output, row, of_piece, trainer.vocabulary)

    buckets = torch.empty(publish_bytes, dtype=torch.uint8, device=trainer.platform.device)
    reserved = [*trainer.optimizer.missing_state(), buckets]
    run_training(trainer.model, rows, loss, trainer.platform)
    del reserved, buckets
    for chunk in trainer.model.wrapped:
        chunk.zero_grad_buffer()


def longest_rows(trainer: Trainer, num_tokens: int) -> Shard:
    """As many rows as the pipeline holds at once; for the interleaved schedule, which starts earlier, twice as many.

    A row is one trajectory, or several where the model takes no longer ones; all but their first tokens are
    actions.
    """
    model, parallel = trainer.model, trainer.parallel
    longest = model.chunks[0].max_tokens or num_tokens
    num_rows = parallel.pipeline_size * (2 if parallel.virtual_stages > 1 else 1)
    starts = np.arange(0, num_tokens, longest)  # in a row
    place = np.arange(num_tokens * num_rows)
    is_action = place % num_tokens % longest > 0
    return Shard(
        offsets=np.append((np.arange(num_rows)[:, None] * num_tokens + starts).ravel(), len(place)),
        token_ids=(place * _STRIDE % model.hf_config.vocab_size).astype(np.int32),
        is_action=is_action,
        rollout_logprobs=np.zeros(len(place), dtype=np.float32),
        version=is_action.astype(np.int32) - 1,
        micro_batches=tuple(tuple(range(i * len(starts), (i + 1) * len(starts))) for i in range(num_rows)),
        num_action_tokens=int(is_action.sum()) * parallel.data_size,
    )


def _explain(trainer: Trainer, config: RoleConfig, publish_bytes: int, error: BaseException) -> str:
    model, parallel = trainer.model, trainer.parallel
    stages = role_memory(
        model.hf_config,
        config,
        dtype=str(model.config.params_dtype).removeprefix("torch."),
        frozen=model.frozen_hf_names,
        transformer_engine=trainer.platform.transformer_engine,
    )
    parts = stages[parallel.pipeline_rank].parts | ({"publish": publish_bytes} if publish_bytes else {})
    return (
        f"{model.hf_config.role}, rank {parallel.rank}: the longest micro-batch, {config.max_tokens_per_micro_batch} "
        f"tokens, does not fit in memory: {str(error).splitlines()[0]} Predicted for this rank: {describe(parts)}; "
        f"{advice(parts, config)}"
    )
