"""Which layers lie in which pipeline stage. Pure.

Stage s is chunk s // pipeline of pipeline rank s % pipeline: with virtual stages a rank holds several, far apart.
"""

import functools
import itertools


@functools.cache
def stage_layers(may_start: tuple[bool, ...], num_stages: int) -> tuple[range, ...]:
    """Layers of each stage in their order, as even as can be; the first stages take what is over.

    `may_start` [num_layers]: whether a stage may start with the layer. Where every one may, the last stage, which also
    has the output layer, is never among the longer ones, unless all are equal.

    Raises:
        ValueError: fewer such layers than stages.

    >>> stage_layers((True,) * 5, 2)
    (range(0, 3), range(3, 5))
    >>> stage_layers((True, False, False, True, True), 2)
    (range(0, 3), range(3, 5))
    """
    starts = [layer for layer, may in enumerate(may_start) if may]
    if len(starts) < num_stages:
        raise ValueError(
            f"pipeline * virtual_stages = {num_stages} stages, but the model has {len(may_start)} layers, and a stage "
            f"can start with {len(starts)} of them: so at most {len(starts)} stages"
        )
    # best[start]: the stages from there to the end; of all, even ones have the smallest sum of squares
    best: dict[int, tuple[int, list[int]]] = {len(may_start): (0, [])}  # that sum, and their lengths negated
    for _ in range(num_stages):
        best = {
            start: min(
                (cost + (end - start) ** 2, [start - end, *rest]) for end, (cost, rest) in best.items() if end > start
            )
            for start in starts
            if start < max(best)
        }
    bounds = list(itertools.accumulate((-length for length in best[0][1]), initial=0))
    return tuple(range(start, end) for start, end in itertools.pairwise(bounds))


@functools.cache
def stage_of(layer: int, may_start: tuple[bool, ...], num_stages: int) -> int:
    """The stage that holds the layer."""
    return next(s for s, layers in enumerate(stage_layers(may_start, num_stages)) if layer in layers)
