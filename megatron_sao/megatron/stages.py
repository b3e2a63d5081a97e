"""Which layers lie in which pipeline stage. Pure.

Stage s is chunk s // pipeline of pipeline rank s % pipeline: with virtual stages a rank holds several, far apart.
"""

import functools


@functools.cache
def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Layers of each stage in their order, as even as can be; the first stages take what is over.

    The last stage also has the output layer, so it is never among the longer ones, unless all are equal.

    Raises:
        ValueError: fewer layers than stages.

    >>> stage_layers(5, 2)
    (range(0, 3), range(3, 5))
    """
    if num_layers < num_stages:
        raise ValueError(
            f"pipeline * virtual_stages = {num_stages} stages, but the model has {num_layers} layers: a stage needs a "
            f"layer, so at most {num_layers} stages"
        )
    each, over = divmod(num_layers, num_stages)
    starts = [stage * each + min(stage, over) for stage in range(num_stages + 1)]
    return tuple(range(start, end) for start, end in zip(starts[:-1], starts[1:], strict=True))


@functools.cache
def stage_of(layer: int, num_layers: int, num_stages: int) -> int:
    """The stage that holds the layer."""
    return next(s for s, layers in enumerate(stage_layers(num_layers, num_stages)) if layer in layers)
