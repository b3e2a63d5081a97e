"""Supervised training on demonstrations, with plain transformers on a CPU."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_sao.rollout.render import Renderer
from megatron_sao.types import Prompt
from tools.warm_start.demonstrations import SHARES, Demonstration, demonstrations
from tools.warm_start.model import build_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    seed: int = 0
    num_updates: int = 400
    batch_size: int = 64  # demonstrations
    learning_rate: float = 2e-3  # peak
    final_rate_fraction: float = 0.02
    warmup_updates: int = 30
    clip_norm: float = 1.0
    balance_weight: float = 0.01  # of the router's load-balancing loss
    shares: dict[str, float] = field(default_factory=lambda: dict(SHARES))


Progress = Callable[[int, float, float], None]
"""Called after each update with the number done, the loss and the seconds so far."""


def train(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    *,
    progress: Progress,
    config: Qwen3MoeConfig | None = None,
) -> PreTrainedModel:
    """A fresh model after `num_updates` updates. Loss on action tokens only, as the mean over them."""
    torch.manual_seed(recipe.seed)
    model: PreTrainedModel = Qwen3MoeForCausalLM(config or build_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: _rate(update, recipe))
    stream = _endless(prompts, Renderer(tokenizer), recipe)
    start_s = time.monotonic()
    for update in range(recipe.num_updates):
        loss = _loss(model, [next(stream) for _ in range(recipe.batch_size)], recipe.balance_weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        schedule.step()
        progress(update + 1, float(loss.detach()), time.monotonic() - start_s)
    return model.eval()


def _rate(update: int, recipe: Recipe) -> float:
    """Linear warm-up, then linear decay to `final_rate_fraction`; a factor on the peak rate."""
    rising = (update + 1) / recipe.warmup_updates
    falling = max(recipe.final_rate_fraction, 1 - update / recipe.num_updates)
    return min(1.0, rising, falling)


def _endless(prompts: Sequence[Prompt], renderer: Renderer, recipe: Recipe) -> Iterator[Demonstration]:
    rng = random.Random(recipe.seed)
    while True:
        yield from demonstrations(rng.sample(prompts, len(prompts)), renderer, rng, recipe.shares)


def _loss(model: PreTrainedModel, batch: Sequence[Demonstration], balance_weight: float) -> torch.Tensor:
    """Right-padded rows: no real token sees a padding one, and none is a target."""
    num_tokens = max(len(demonstration.token_ids) for demonstration in batch)
    ids = torch.zeros(len(batch), num_tokens, dtype=torch.long)
    is_action = torch.zeros(len(batch), num_tokens, dtype=torch.bool)
    for row, demonstration in enumerate(batch):
        length = len(demonstration.token_ids)
        ids[row, :length] = torch.tensor(demonstration.token_ids)
        is_action[row, :length] = torch.tensor(demonstration.is_action)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_router_logits=True)
    target = is_action[:, 1:]
    loss: torch.Tensor = cross_entropy(output.logits[:, :-1][target], ids[:, 1:][target])
    return loss.add(output.aux_loss, alpha=balance_weight)
