"""The k-th prompt depends on the source, the seed and k alone."""

import pytest

from megatron_sao.data.prompts import PromptStream
from megatron_sao.types import Message, Prompt


def source(num: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", position=0, messages=(Message(role="user", content=str(i)),)) for i in range(num)]


def test_each_epoch_shows_every_prompt_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(source(20), seed=1)
    first, second = ([stream.next().id for _ in range(20)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(p.id for p in source(20))
    assert first != second


def test_positions_count_the_stream() -> None:
    stream = PromptStream(source(3), seed=1)
    assert [stream.next().position for _ in range(7)] == list(range(7))


def test_a_restored_stream_goes_on_as_if_it_had_never_stopped() -> None:
    whole, first = PromptStream(source(10), seed=3), PromptStream(source(10), seed=3)
    expected = [whole.next() for _ in range(25)]
    seen = [first.next() for _ in range(13)]
    second = PromptStream(source(10), seed=3)
    second.restore(first.state())
    assert [*seen, *(second.next() for _ in range(12))] == expected


def test_another_seed_gives_another_order() -> None:
    one, other = PromptStream(source(20), seed=1), PromptStream(source(20), seed=2)
    assert [one.next().id for _ in range(20)] != [other.next().id for _ in range(20)]


@pytest.mark.parametrize(("num", "min_size"), [(0, 1), (5, 8)])
def test_a_source_smaller_than_the_slots_is_refused(num: int, min_size: int) -> None:
    with pytest.raises(ValueError, match=rf"has {num} prompts, at least {min_size} are needed"):
        PromptStream(source(num), seed=0, min_size=min_size)


def test_repeated_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats a prompt id"):
        PromptStream(source(2) + source(1), seed=0)


def test_a_state_of_another_source_is_refused() -> None:
    with pytest.raises(ValueError, match="saved with seed 0 over 3 prompts, this one has seed 0 over 4"):
        PromptStream(source(4), seed=0).restore(PromptStream(source(3), seed=0).state())
