"""A checkpoint behind the engine's `generate`, in this process: for a look at a model without a server."""

import asyncio

import torch
from transformers import PreTrainedModel

from megatron_sao.rollout.engine import GenerateRequest, Generation


class LocalEngine:
    """Requests that wait at the same time are sampled as one batch, at temperature 1. The weight version is 0."""

    name = "local"

    def __init__(self, model: PreTrainedModel, *, max_batch: int = 128) -> None:
        self._model = model
        self._max_batch = max_batch
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(0.01, self._serve)
        return await answer

    def _serve(self) -> None:
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        if self._waiting:
            asyncio.get_running_loop().call_later(0.01, self._serve)
        generations = sample(self._model, [request for request, _ in batch])
        for (_, answer), generation in zip(batch, generations, strict=True):
            if not answer.done():
                answer.set_result(generation)


@torch.no_grad()
def sample(model: PreTrainedModel, requests: list[GenerateRequest]) -> list[Generation]:
    """One generation per request. Left-padded; all requests have the same stop tokens."""
    longest = max(len(request.input_ids) for request in requests)
    pad = int(model.config.pad_token_id)
    ids = torch.full((len(requests), longest), pad)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request.input_ids) :] = torch.tensor(request.input_ids)
        mask[row, longest - len(request.input_ids) :] = 1
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max(request.max_new_tokens for request in requests),
        eos_token_id=list(requests[0].stop_token_ids),
        pad_token_id=pad,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.stack(output.logits, dim=1).float().log_softmax(-1)
    new_ids = output.sequences[:, longest:]
    chosen = logprobs.gather(-1, new_ids[..., None])[..., 0]
    return [_cut(request, new_ids[row], chosen[row]) for row, request in enumerate(requests)]


def _cut(request: GenerateRequest, ids: torch.Tensor, logprobs: torch.Tensor) -> Generation:
    """A row up to its own stop token or its own limit."""
    kept: list[int] = []
    for token in ids.tolist()[: request.max_new_tokens]:
        kept.append(int(token))
        if token in request.stop_token_ids:
            break
    stopped = kept[-1] in request.stop_token_ids
    return Generation(
        output_ids=tuple(kept),
        logprobs=tuple(logprobs[: len(kept)].clamp(max=0.0).tolist()),
        versions=(0,) * len(kept),
        finish="stop" if stopped else "length",
        matched_stop=kept[-1] if stopped else None,
        engine="local",
    )
