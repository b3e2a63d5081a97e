"""Episodes are always in flight, never more than there are slots; what breaks is dropped and counted, never scored.

The engine is a fake that answers from a script.
"""

import asyncio

import pytest

from megatron_sao.data.buffer import BufferClosedError, TrajectoryBuffer
from megatron_sao.data.prompts import PromptStream
from megatron_sao.rollout.engine import EngineError, GenerateRequest
from megatron_sao.rollout.episode import Limits, SingleTurnEpisode
from megatron_sao.rollout.render import Renderer
from megatron_sao.rollout.service import EpisodeRunner, RolloutService, run_prompts
from megatron_sao.types import Message, Prompt, Reward
from tests.support.scripted_turns import ScriptedTurns, generation
from tools.warm_start.model import build_tokenizer

TOKENIZER = build_tokenizer()
RENDERER = Renderer(TOKENIZER)
LIMITS = Limits(max_episode_tokens=40, max_turn_tokens=20, max_turns=1)
PROMPTS = [Prompt(id=f"p{i}", position=0, messages=(Message(role="user", content=str(i)),)) for i in range(50)]
DOWN = EngineError("e", "generate", None, "connection refused")


async def one(prompt, trajectories) -> Reward:
    return Reward(value=1.0, metrics={"length": float(len(trajectories[0].texts[0]))})


async def refuses_p3(prompt, trajectories) -> Reward:
    return Reward(value=2.0 if prompt.id == "p3" else 1.0)


async def answers(request: GenerateRequest):
    return generation(*RENDERER.plain_ids("ok"), TOKENIZER.eos_token_id)


def runner(engine: ScriptedTurns, **changes) -> EpisodeRunner:
    values = {"reward": one, "limits": LIMITS} | changes
    return EpisodeRunner(engine=engine, episode=SingleTurnEpisode(TOKENIZER), **values)


class Running:
    """A service with its parts, stopped at the end."""

    def __init__(
        self, script, *, num_slots=4, max_consecutive_failures=3, slot_timeout_s=30.0, prompts=PROMPTS, **changes
    ) -> None:
        self.engine = ScriptedTurns(script)
        self.buffer = TrajectoryBuffer(num_slots)
        self.prompts = PromptStream(prompts, seed=0)
        self.service = RolloutService(
            runner(self.engine, **changes),
            prompts=self.prompts,
            buffer=self.buffer,
            max_consecutive_failures=max_consecutive_failures,
            slot_timeout_s=slot_timeout_s,
        )

    async def __aenter__(self) -> "Running":
        self.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.stop()
        assert self.engine.num_running == 0

    async def take(self, num: int):
        return await self.service.watch(self.buffer.take(num, timeout_s=2))


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_as_many_episodes_run_as_there_are_slots_and_no_more_until_slots_are_released() -> None:
    async with Running(answers, num_slots=4) as r:
        await settled()
        assert (r.engine.max_running, len(r.engine.requests)) == (4, 4)
        taken = await r.take(2)
        await settled()
        assert len(r.engine.requests) == 4
        r.buffer.release(taken)
        await settled()
        assert len(r.engine.requests) == 6


async def test_finished_episodes_carry_their_reward_on_the_last_action_token() -> None:
    async with Running(answers) as r:
        ((trajectory,),) = await r.take(1)
    assert trajectory.reward[-1] == trajectory.reward.sum() == 1.0


async def test_prompts_are_admitted_in_the_order_of_the_stream() -> None:
    async with Running(answers, num_slots=8) as r:
        episodes = await r.service.watch(r.buffer.take(8, timeout_s=2, in_order=True))
    assert [trajectory.position for (trajectory,) in episodes] == list(range(8))
    stream = PromptStream(PROMPTS, seed=0)
    assert [trajectory.prompt_id for (trajectory,) in episodes] == [stream.next().id for _ in range(8)]


async def test_a_broken_episode_is_dropped_and_counted_and_its_slot_goes_to_the_next_prompt() -> None:
    async def first_is_down(request):
        return DOWN if request is r.engine.requests[0] else await answers(request)

    async with (r := Running(first_is_down, num_slots=2)):
        episodes = await r.take(2)
        metrics = r.service.metrics()
    assert [trajectory.position for (trajectory,) in episodes] == [1, 2]
    assert metrics["rollout/num_broken_engine"].value == metrics["buffer/num_dropped_engine"].value == 1
    assert metrics["rollout/num_broken"].value == r.buffer.num_dropped == 1


async def test_an_aborted_generation_is_never_a_sample() -> None:
    async def aborts_once(request):
        return generation(finish="abort") if len(r.engine.requests) == 1 else await answers(request)

    async with (r := Running(aborts_once, num_slots=1)):
        ((trajectory,),) = await r.take(1)
        assert trajectory.position == 1
        assert r.service.metrics()["rollout/num_broken_episode"].value == 1


async def test_a_reward_out_of_range_drops_its_episode() -> None:
    async with Running(answers, num_slots=50, reward=refuses_p3) as r:
        episodes = await r.take(49)
        assert r.service.metrics()["rollout/num_broken_reward"].value == 1
    assert "p3" not in {trajectory.prompt_id for (trajectory,) in episodes}


async def test_after_too_many_failures_in_a_row_the_service_gives_up_with_the_last_error() -> None:
    async def down(request):
        return DOWN

    async with Running(down, max_consecutive_failures=3) as r:
        with pytest.raises(RuntimeError, match="3 episodes in a row broke; .*connection refused") as caught:
            await r.take(1)
        assert caught.value.__cause__ is DOWN
        with pytest.raises(BufferClosedError, match="connection refused"):
            await r.buffer.take(1, timeout_s=2)
        await settled()
        assert len(r.engine.requests) <= 8  # nothing new is admitted


async def test_failures_that_are_not_in_a_row_do_not_add_up() -> None:
    async def two_of_three(request):
        return await answers(request) if len(r.engine.requests) % 3 == 0 else DOWN

    async with (r := Running(two_of_three, num_slots=1, max_consecutive_failures=3)):
        for _ in range(5):
            r.buffer.release(await r.take(1))
        assert r.buffer.num_dropped >= 10


async def test_a_prompt_that_leaves_no_room_is_dropped_and_counted_and_the_run_goes_on() -> None:
    long = Prompt(id="long", position=0, messages=(Message(role="user", content="1" * 40),))
    async with Running(answers, num_slots=5, prompts=[*PROMPTS[:4], long]) as r:
        for _ in range(5):  # every epoch comes to it once
            r.buffer.release(await r.take(4))
        assert r.service.metrics()["rollout/num_broken_episode"].value >= 4


async def test_prompts_that_never_leave_room_end_the_run_with_their_message() -> None:
    async with Running(answers, limits=Limits(max_episode_tokens=2, max_turn_tokens=2, max_turns=1)) as r:
        with pytest.raises(RuntimeError, match="3 episodes in a row broke; .*which leaves no room for an action"):
            await r.take(1)


async def test_what_a_person_must_change_ends_the_run_at_once() -> None:
    async def foreign_id(request):
        raise ValueError("input id 400 at position 3 is outside the vocabulary")

    async with Running(foreign_id) as r:
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await r.take(1)


async def test_a_hanging_episode_at_lag_zero_is_dropped_and_the_step_waits_for_its_replacement() -> None:
    """The step's deadline is one episode's, and the replacement takes most of one again."""

    async def slow_once(request):
        await asyncio.sleep(9 if len(r.engine.requests) == 1 else 0.12)
        return await answers(request)

    async with (r := Running(slow_once, num_slots=1, episode_timeout_s=0.2)):
        ((trajectory,),) = await r.service.watch(r.buffer.take(1, timeout_s=0.25))
        assert trajectory.position == 1
        assert r.service.metrics()["rollout/num_broken_episode"].value == 1


async def test_a_service_that_gets_no_slot_within_its_deadline_says_so() -> None:
    async with Running(answers, num_slots=1, slot_timeout_s=0.05) as r:
        await r.take(1)  # never released
        with pytest.raises(TimeoutError, match=r"waited 0\.05 s for a free slot"):
            await r.take(1)


async def test_an_episode_that_takes_too_long_is_broken() -> None:
    async def slow_once(request):
        await asyncio.sleep(9 if len(r.engine.requests) == 1 else 0)
        return await answers(request)

    async with (r := Running(slow_once, num_slots=1, episode_timeout_s=0.05)):
        await r.take(1)
        assert r.service.metrics()["rollout/num_broken_episode"].value == 1


async def test_stopping_cancels_what_runs_and_wakes_who_waits() -> None:
    async def never(request):
        await asyncio.sleep(99)

    async with Running(never) as r:
        await settled()
        waiting = asyncio.create_task(r.buffer.take(1, timeout_s=9))
        await asyncio.sleep(0)
        await r.service.stop(timeout_s=1)
        assert r.engine.num_running == 0
        with pytest.raises(BufferClosedError):
            await waiting


async def test_metrics_of_the_reward_are_means_since_the_last_call() -> None:
    async with Running(answers, num_slots=2) as r:
        await r.take(2)
        assert r.service.metrics()["reward/length"].value == 2.0
        assert r.service.metrics()["reward/length"].weight == 0  # no episode since


async def test_watching_gives_the_works_own_error_when_the_service_is_well() -> None:
    async with Running(answers) as r:
        with pytest.raises(TimeoutError, match="waited 0.01 s for 4 finished"):
            await r.service.watch(asyncio.wait_for(never_enough(r), 5))


async def never_enough(r: Running):
    await r.take(1)
    return await r.buffer.take(4, timeout_s=0.01)


async def test_an_evaluation_gives_rewards_in_the_prompts_order_within_its_bound() -> None:
    async def by_id(prompt, trajectories) -> Reward:
        return Reward(value=int(prompt.id[1:]) / 100)

    engine = ScriptedTurns(answers)
    rewards = await run_prompts(PROMPTS, runner(engine, reward=by_id), concurrency=7)
    assert [reward.value for reward in rewards] == [i / 100 for i in range(50)]
    assert engine.max_running == 7
    assert not any(request.wants_routed for request in engine.requests)


async def test_an_evaluation_tries_a_broken_episode_again_and_then_gives_up() -> None:
    engine = ScriptedTurns([DOWN, DOWN, await answers(None)])
    assert [r.value for r in await run_prompts(PROMPTS[:1], runner(engine), max_attempts=3)] == [1.0]
    with pytest.raises(RuntimeError, match="prompt 'p0' broke 2 times: .*connection refused"):
        await run_prompts(PROMPTS[:1], runner(ScriptedTurns([DOWN, DOWN])), max_attempts=2)
