"""Did the weights arrive? Pure comparisons: a digest per tensor, log-probs of a fixed prompt. No torch.

Legend: P tokens of the fixed prompt.
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

_NAMES_SHOWN = 8
_PROMPT_SEED = 20260708


def fixed_prompt(vocab_size: int, num_tokens: int = 64) -> tuple[int, ...]:
    """[P] the same token ids in every run: drawn at random, so that they touch many experts and are in no episode."""
    draw = random.Random(_PROMPT_SEED)
    return tuple(draw.randrange(vocab_size) for _ in range(num_tokens))


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> tuple[str, ...]:
    """Names whose digest differs or that only one side has, sorted."""
    names = expected.keys() | found.keys()
    return tuple(sorted(name for name in names if expected.get(name) != found.get(name)))


def check_reset(loaded: Mapping[str, str], reset: Mapping[str, str]) -> tuple[str, ...]:
    """Names that the reset left as they were: of these the check after the publish proves nothing.

    Raises:
        RuntimeError: the reset changed nothing, so that a publish that sends nothing would pass.
    """
    if not differing(loaded, reset):
        raise RuntimeError(
            f"the engine says that it reset its {len(loaded)} tensors, but none of their checksums changed: the first "
            "publish cannot be verified"
        )
    return tuple(sorted(name for name in loaded if reset.get(name) == loaded[name]))


def check_returned(loaded: Mapping[str, str], published: Mapping[str, str]) -> None:
    """After a publish of the start weights every checksum is that of the load from disk.

    Raises:
        RuntimeError: naming the tensors that differ.
    """
    names = differing(loaded, published)
    if not names:
        return
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    raise RuntimeError(
        f"the first publish left {len(names)} of {len(loaded)} engine tensors other than they were loaded from disk: "
        f"{', '.join(names[:_NAMES_SHOWN])}{more}. Look at the name mapping of these tensors (an engine drops a name "
        "that it does not know without a word), and whether the actor was loaded from the engine's model directory"
    )


def logprob_difference(engine: ArrayLike, actor: ArrayLike) -> float:
    """max |engine - actor| over log-probs [P-1] in nats; inf when one is not finite.

    Raises:
        RuntimeError: the two have different lengths.
    """
    engine_P, actor_P = np.asarray(engine, dtype=np.float64), np.asarray(actor, dtype=np.float64)
    if engine_P.shape != actor_P.shape or not engine_P.size:
        raise RuntimeError(f"log-probs of shape {engine_P.shape} from the engine, {actor_P.shape} from the actor")
    if not (np.isfinite(engine_P).all() and np.isfinite(actor_P).all()):
        return float("inf")
    return float(np.abs(engine_P - actor_P).max())


def check_logprobs(
    engine: Sequence[float],
    actor: ArrayLike,
    *,
    tolerance: float | None,
    mean_tolerance: float | None = None,
    what: str,
) -> tuple[float, float]:
    """max and mean |engine - actor| over the tokens. `what` says which publish it was.

    Raises:
        RuntimeError: one of them is above its tolerance (None: no limit), or a log-prob is not finite.
    """
    largest = logprob_difference(engine, actor)
    differences = np.abs(np.asarray(engine, dtype=np.float64) - np.asarray(actor, dtype=np.float64))
    mean = float(differences.mean())
    within = (tolerance is None or largest <= tolerance) and (mean_tolerance is None or mean <= mean_tolerance)
    if within and np.isfinite(largest):
        return largest, mean
    raise RuntimeError(
        f"after {what} engine and actor differ on the fixed prompt by at most {largest:.3g} nats (at token "
        f"{int(np.argmax(differences)) + 1}) and by {mean:.3g} in the mean; publish.logprob_tolerance is {tolerance}, "
        f"publish.logprob_mean_tolerance {mean_tolerance}. If the first publish passed its checksums, look at the plan "
        "(a trained tensor taken for a frozen one), the version that the engine serves and the dtypes on both sides; "
        "else at the name mapping (an expert left out, gate and up swapped)"
    )
