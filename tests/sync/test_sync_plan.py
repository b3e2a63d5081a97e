"""The publish plan: every tensor once, aligned for the receiver, the same on every rank."""

import dataclasses
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sao.sync.plan import Publishable, check_digest, make_plan, offsets, tensor_bytes
from megatron_sao.types import ITEM_BYTES, Bucket, PublishPlan, TensorSpec


def tensor(
    name: str, dtype: str = "float32", shape: tuple[int, ...] = (4,), *, trained: bool = True, is_buffer: bool = False
) -> Publishable:
    return Publishable(spec=TensorSpec(name=name, dtype=dtype, shape=shape), trained=trained, is_buffer=is_buffer)


def random_tensors(seed: int) -> list[Publishable]:
    draw = random.Random(seed)
    return [
        tensor(
            f"layer.{index}.weight",
            draw.choice(["float32", "bfloat16", "uint8", "float64"]),
            tuple(draw.randrange(0, 9) for _ in range(draw.randrange(0, 3))),
            trained=index == 0 or draw.random() < 0.6,
            is_buffer=draw.random() < 0.1,
        )
        for index in range(draw.randrange(1, 60))
    ]


def sglang_receiver() -> Any:
    """SGLang's own bucket class, from its file alone: the package as a whole wants a GPU build to be imported."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "srt" / "weight_sync" / "tensor_bucket.py"
    spec = importlib.util.spec_from_file_location("sglang_tensor_bucket", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FlattenedTensorBucket


def names(plan: PublishPlan) -> list[str]:
    return [spec.name for bucket in plan.buckets for spec in bucket.tensors]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("full", [True, False])
def test_every_chosen_tensor_is_sent_once_in_aligned_buckets_within_the_bound(seed: int, full: bool) -> None:
    tensors, bucket_bytes = random_tensors(seed), random.Random(seed).randrange(1, 600)
    chosen = [t.spec for t in tensors if full or t.trained or t.is_buffer]
    plan = make_plan(tensors, bucket_bytes=bucket_bytes, full=full)
    assert sorted(names(plan)) == sorted(spec.name for spec in chosen)
    assert plan.num_bytes == sum(map(tensor_bytes, chosen))
    for bucket in plan.buckets:
        sizes = [tensor_bytes(spec) for spec in bucket.tensors]
        assert bucket.num_bytes == sum(sizes)
        assert bucket.num_bytes <= bucket_bytes or sum(size > 0 for size in sizes) == 1
        assert all(at % ITEM_BYTES[spec.dtype] == 0 for at, spec in zip(offsets(bucket), bucket.tensors, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_sglangs_receiver_takes_every_bucket_and_finds_the_same_offsets(seed: int) -> None:
    receiver = sglang_receiver()
    for bucket in make_plan(random_tensors(seed), bucket_bytes=400, full=True).buckets:
        columns = zip(*((spec.name, spec.dtype, spec.shape) for spec in bucket.tensors), strict=True)
        received = receiver.empty(*(list(column) for column in columns), "cpu")
        assert tuple(meta.start_idx for meta in received.get_metadata()) == offsets(bucket)
        assert len(received.get_flattened_tensor()) == bucket.num_bytes


def test_item_sizes_are_those_of_torch() -> None:
    assert all(getattr(torch, name).itemsize == size for name, size in ITEM_BYTES.items())


def test_only_trained_tensors_and_buffers_are_sent_unless_all_are_asked_for() -> None:
    tensors = [tensor("trained"), tensor("frozen", trained=False), tensor("bias", trained=False, is_buffer=True)]
    assert names(make_plan(tensors, bucket_bytes=100, full=False)) == ["trained", "bias"]
    assert names(make_plan(tensors, bucket_bytes=100, full=True)) == ["trained", "frozen", "bias"]


def test_joined_tensors_share_a_bucket_and_are_sent_if_one_of_them_is_trained() -> None:
    """SGLang fuses q_a_proj with kv_a_proj_with_mqa, and forgets the one that came alone when its load ends."""
    frozen = tensor("q_a", trained=False)
    tensors = [tensor("a"), frozen, dataclasses.replace(tensor("kv_a"), joined=True), tensor("b")]
    for full in (True, False):
        plan = make_plan(tensors, bucket_bytes=32, full=full)
        assert [[spec.name for spec in bucket.tensors] for bucket in plan.buckets] == [["a"], ["q_a", "kv_a"], ["b"]]
    untrained = [tensor("a"), frozen, dataclasses.replace(frozen, spec=tensor("kv_a").spec, joined=True)]
    assert names(make_plan(untrained, bucket_bytes=32, full=False)) == ["a"]


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    plan = make_plan([tensor("a"), tensor("large", shape=(100,)), tensor("b")], bucket_bytes=64, full=True)
    assert [[spec.name for spec in bucket.tensors] for bucket in plan.buckets] == [["a"], ["large"], ["b"]]


def test_the_digest_says_names_dtypes_shapes_order_and_cuts() -> None:
    base = [tensor("a", shape=(2, 3)), tensor("b", shape=(2, 3))]
    variants = [
        make_plan(base, bucket_bytes=100, full=True),
        make_plan(base[::-1], bucket_bytes=100, full=True),
        make_plan(base, bucket_bytes=24, full=True),
        make_plan([tensor("a", shape=(3, 2)), base[1]], bucket_bytes=100, full=True),
        make_plan([tensor("a", "int32", shape=(2, 3)), base[1]], bucket_bytes=100, full=True),
        make_plan([tensor("c", shape=(2, 3)), base[1]], bucket_bytes=100, full=True),
    ]
    assert len({plan.digest for plan in variants}) == len(variants)
    assert make_plan(list(base), bucket_bytes=100, full=True) == variants[0]


def owned(name: str, owner: int) -> Publishable:
    return dataclasses.replace(tensor(name), owner=owner)


def test_direct_sends_leave_from_the_owners_in_turn_and_no_bucket_mixes_them() -> None:
    tensors = [owned("shared", 0), owned("a0", 0), owned("a1", 1), owned("b1", 1), owned("c1", 1), owned("a2", 2)]
    plan = make_plan(tensors, bucket_bytes=16, full=True, direct=True)
    assert names(plan) == ["shared", "a1", "a2", "a0", "b1", "c1"]
    assert [bucket.source for bucket in plan.buckets] == [0, 1, 2, 0, 1, 1]
    assert plan.sources == (0, 1, 2)
    gathered = make_plan(tensors, bucket_bytes=16, full=True)
    assert (names(gathered), gathered.sources) == ([each.spec.name for each in tensors], (0,))


def test_the_digest_says_who_sends() -> None:
    """The same buckets in the same order from other ranks: two digests, or ranks would wait for each other."""
    plans = [make_plan([owned("a", 0), owned("b", rank)], bucket_bytes=16, full=True, direct=True) for rank in (0, 1)]
    gathered = make_plan([owned("a", 0), owned("b", 1)], bucket_bytes=16, full=True)
    assert names(plans[0]) == names(plans[1]) == names(gathered)
    assert plans[0] == gathered
    assert plans[0].digest != plans[1].digest


def test_a_plan_that_changed_on_its_way_is_refused() -> None:
    plan = make_plan([tensor("a"), tensor("b")], bucket_bytes=100, full=True)
    check_digest(plan)
    cut = Bucket(tensors=plan.buckets[0].tensors[:1], num_bytes=16)
    with pytest.raises(RuntimeError, match="digest"):
        check_digest(PublishPlan(buckets=(cut,), digest=plan.digest))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor("tied"), tensor("tied")], "tied; tied tensors are sent once"),
        ([tensor("a", "complex64")], "a has dtype 'complex64'"),
        ([tensor("a", trained=False)], "nothing to send"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(tensors: list[Publishable], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(tensors, bucket_bytes=100, full=False)
