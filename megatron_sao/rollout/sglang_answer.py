"""SGLang's JSON answers, read into records. What is missing, short, shifted or of another type is an EngineError.

Axis letters: P prompt tokens, G generated tokens.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sao.data.routed_experts import RouterShape
from megatron_sao.rollout.engine import EngineError, GenerateRequest, Generation, PromptScore
from megatron_sao.types import WeightVersion

ROUNDING = 1e-5  # a log-prob this far above 0 is a probability of 1, rounded
CALL = "/generate"


def read_generation(
    engine: str, request: GenerateRequest, answer: Any, *, router: RouterShape | None = None
) -> Generation:
    """`router`: the request asked for the experts that these routers chose."""
    try:
        return _generation(engine, request, answer, router)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(engine, CALL, None, f"request {request.rid}: {_reason(error)}") from error


def read_score(engine: str, input_ids: Sequence[int], answer: Any, *, vocab_size: int) -> PromptScore:
    """The answer to a request with `logprob_start_len` 0: its first entry has no log-prob.

    SGLang writes the last id of the vocabulary as 0 here (it takes larger ones for image padding); the log-prob is
    right.
    """
    try:
        meta = answer["meta_info"]
        _raise_if_aborted(meta)
        entries = meta["input_token_logprobs"]
        last = vocab_size - 1
        written = [0 if token == last else token for token in input_ids]
        _check_ids([0 if entry[1] == last else entry[1] for entry in entries], written, "scored")
        logprobs = tuple(_logprob(entry[0]) for entry in entries[1:])
        return PromptScore(
            logprobs=logprobs, cached_tokens=int(meta["cached_tokens"]), version=int(meta["weight_version"])
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(engine, CALL, None, f"score of {len(input_ids)} tokens: {_reason(error)}") from error


def expand_spans(spans: Sequence[Any], num_tokens: int) -> tuple[WeightVersion, ...]:
    """One version per token from `[{"version": "3", "start": 0, "end": 7}, ...]`, which must tile 0..num_tokens.

    Raises:
        ValueError: a gap, an overlap, a wrong end, or a version that is not an integer.
    """
    versions: list[WeightVersion] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise ValueError(f"version spans do not follow each other: {list(spans)}")
        versions.extend([int(span["version"])] * (span["end"] - span["start"]))
    if len(versions) != num_tokens:
        raise ValueError(f"version spans cover {len(versions)} of {num_tokens} tokens: {list(spans)}")
    return tuple(versions)


def _generation(engine: str, request: GenerateRequest, answer: Any, router: RouterShape | None) -> Generation:
    meta = answer["meta_info"]
    output_ids = tuple(int(token) for token in answer["output_ids"])
    reason = meta["finish_reason"]
    finish = reason["type"]
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {reason}")
    if len(output_ids) > request.max_new_tokens:
        raise ValueError(f"{len(output_ids)} tokens where at most {request.max_new_tokens} were asked for")
    entries = meta["output_token_logprobs"] if output_ids else []
    _check_ids([entry[1] for entry in entries], output_ids, "generated")
    versions = expand_spans(meta["weight_versions"] if output_ids else [], len(output_ids))
    chosen = None if router is None or finish == "abort" else _routed_experts(request, meta, versions, router)
    return Generation(
        output_ids=output_ids,
        logprobs=tuple(_logprob(entry[0]) for entry in entries),
        versions=versions,
        routed_experts=chosen,
        finish=finish,
        matched_stop=reason["matched"] if finish == "stop" and isinstance(reason["matched"], int) else None,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        engine=engine,
    )


def _routed_experts(
    request: GenerateRequest, meta: Any, versions: Sequence[WeightVersion], router: RouterShape
) -> NDArray[np.unsignedinteger]:
    """[P+G-1-num_routed, layers, top_k]. SGLang sends int32, base64, C order, of the whole model's layers.

    A retracted request computes its tokens anew and keeps only the last record. Where the weights have changed since
    they were first computed, that is another choice than the one they were sampled by, and counts as missing.
    """
    if "routed_experts" not in meta:
        raise ValueError("no routed_experts though asked for: start the server with --enable-return-routed-experts")
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), dtype="<i4")
    num_prompt = len(request.input_ids)
    expected = (num_prompt + len(versions) - 1 - request.num_routed, router.num_layers, router.top_k)
    if ids.size != np.prod(expected):
        raise ValueError(f"{ids.size} routed experts, not {' * '.join(map(str, expected))} (rows, layers, top-k)")
    packed = router.pack(ids.reshape(expected))
    first_new = versions.index(versions[-1])  # the first token of the last weights
    if meta["num_retractions"] and first_new:
        packed[: num_prompt + first_new - 1 - request.num_routed] = router.missing
    return packed


def _raise_if_aborted(meta: Any) -> None:
    if meta["finish_reason"]["type"] == "abort":
        raise ValueError(f"aborted: {meta['finish_reason'].get('message')}")


def _check_ids(ids: Sequence[int], expected: Sequence[int], what: str) -> None:
    if len(ids) != len(expected):
        raise ValueError(f"{len(ids)} log-probs for {len(expected)} {what} tokens")
    if list(ids) != list(expected):
        raise ValueError(f"the log-probs belong to other tokens than the {len(expected)} {what} ones")


def _logprob(value: Any) -> float:
    if not isinstance(value, float | int):
        raise ValueError(f"a log-prob is {value!r}")
    return 0.0 if 0 < value <= ROUNDING else float(value)


def _reason(error: Exception) -> str:
    return f"the answer has no {error}" if isinstance(error, KeyError) else str(error)
