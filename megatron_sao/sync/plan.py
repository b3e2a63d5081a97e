"""Which tensors a publish sends, in which buckets. Pure, no torch: the same input gives the same plan on every rank.

A bucket is one flat run of bytes (SGLang's `flattened_bucket`): its tensors lie end to end, widest dtype first, so that
every tensor starts at a multiple of its own item size, which is what the receiver asks for.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_sao.types import ITEM_BYTES, Bucket, PublishPlan, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Publishable:
    """A whole tensor of the model under its HF name, and whether training can change it."""

    spec: TensorSpec
    trained: bool
    is_buffer: bool  # published although no parameter, e.g. a router's correction bias
    owner: int = 0  # the first rank of the actor that holds it or a shard of it
    joined: bool = False  # to the tensor before it: an engine loads both in one bucket, or neither


def tensor_bytes(spec: TensorSpec) -> int:
    if spec.dtype not in ITEM_BYTES:
        raise ValueError(f"{spec.name} has dtype {spec.dtype!r}; a publish can send: {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[spec.dtype] * math.prod(spec.shape)


def make_plan(tensors: Sequence[Publishable], *, bucket_bytes: int, full: bool, direct: bool = False) -> PublishPlan:
    """Buckets of at most `bucket_bytes` in the order of `tensors`; a larger tensor is a bucket of its own. Joined
    tensors are sent together, even if only one of them is trained.

    `full` sends everything; else what training can change: trained parameters and buffers. `direct`: each tensor leaves
    from its owner, the owners in turn, so that one prepares its bucket while another sends; else all leave from rank 0.

    Raises:
        ValueError: two tensors of one name (tied tensors are given once), an unknown dtype, nothing to send.
    """
    names = [tensor.spec.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"given twice for one publish: {', '.join(twice)}; tied tensors are sent once")
    chosen = [run for run in _runs(tensors) if full or any(tensor.trained or tensor.is_buffer for tensor in run)]
    if not chosen:
        raise ValueError(f"none of {len(names)} tensors is trained or a buffer: a publish has nothing to send")
    by_source: dict[int, list[list[TensorSpec]]] = {}
    for run in chosen:
        by_source.setdefault(run[0].owner if direct else 0, []).append([tensor.spec for tensor in run])
    filled = {source: _fill(runs, bucket_bytes) for source, runs in by_source.items()}
    turns = itertools.zip_longest(*([_bucket(specs, source) for specs in filled[source]] for source in sorted(filled)))
    buckets = tuple(bucket for turn in turns for bucket in turn if bucket is not None)
    return PublishPlan(buckets=buckets, digest=digest(buckets))


def digest(buckets: Sequence[Bucket]) -> str:
    """sha256 over the canonical form: sources, names, dtypes, shapes and byte counts in sending order."""
    rows = [
        [bucket.source, bucket.num_bytes, [[t.name, t.dtype, list(t.shape)] for t in bucket.tensors]]
        for bucket in buckets
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def check_digest(plan: PublishPlan) -> PublishPlan:
    """The plan itself. Raises RuntimeError when its content is not what its digest was made of."""
    found = digest(plan.buckets)
    if found != plan.digest:
        raise RuntimeError(f"a publish plan of digest {plan.digest[:12]} arrived with content of digest {found[:12]}")
    return plan


def offsets(bucket: Bucket) -> tuple[int, ...]:
    """First byte of each tensor of the bucket."""
    sizes = [tensor_bytes(spec) for spec in bucket.tensors]
    return tuple(itertools.accumulate(sizes, initial=0))[:-1]


def _runs(tensors: Sequence[Publishable]) -> list[list[Publishable]]:
    """Each tensor with those that are joined to it."""
    runs: list[list[Publishable]] = []
    for tensor in tensors:
        if tensor.joined:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


def _fill(runs: Iterable[Sequence[TensorSpec]], bucket_bytes: int) -> list[list[TensorSpec]]:
    buckets: list[list[TensorSpec]] = []
    free = 0
    for run in runs:
        size = sum(map(tensor_bytes, run))
        if not buckets or size > free:
            buckets.append([])
            free = bucket_bytes
        buckets[-1].extend(run)
        free -= size  # below 0 after a run that is larger than a bucket: nothing joins it
    return buckets


def _bucket(specs: Sequence[TensorSpec], source: int) -> Bucket:
    widest_first = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])  # stable
    return Bucket(tensors=tuple(widest_first), num_bytes=sum(map(tensor_bytes, widest_first)), source=source)
