"""A whole run with the overlapped loop, everything real: RUN/trace.json shows the critic at work inside the actor's."""

from pathlib import Path

import pytest

from megatron_sao.config import Config
from tests.launch.test_end_to_end import config_of, run
from tests.support.tiny_models import make_tiny_model
from tests.support.traces import Span, check_nesting, spans

pytestmark = [pytest.mark.live, pytest.mark.ranks, pytest.mark.timeout(600)]
NUM_STEPS = 8
CRITIC_WORK = ("critic_update", "critic_values")


def overlapped(config: Config) -> Config:
    """Slots for a batch in training, one taken ahead and one that is generated. Long prompts (the engine has their
    beginning in its cache) and short answers: on two cores, training is what a step waits for.
    """
    rollout = {
        "max_lag": 2,
        "prompts_args": {"prefix": "a long way to go " * 12, "size": 64},
        "max_episode_tokens": 300,
        "max_turn_tokens": 2,
    }
    rows = {"max_tokens_per_micro_batch": 600}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"loop": "overlapped"}),
            "rollout": config.rollout.model_copy(update=rollout),
            "actor": config.actor.model_copy(update=rows),
            "critic": config.critic.model_copy(update=rows),
            "engine": config.engine.model_copy(update={"max_total_tokens": 16384}),
        }
    )


def actor_windows(found: list[Span]) -> dict[int, tuple[Span, Span]]:
    """By batch: the actor's window, from its load to its last command before the next load; and its update alone."""
    actor = sorted((span for span in found if span.row == "actor"), key=lambda span: span.start_us)
    loads = [index for index, span in enumerate(actor) if span.name == "load_batch"]
    windows = {}
    for start, end in zip(loads, [*loads[1:], len(actor)], strict=True):
        commands = [span for span in actor[start:end] if span.name != "export"]
        update = next(span for span in commands if span.name == "actor_update")
        load = commands[0]
        last_us = max(span.end_us for span in commands)
        window = Span(row="actor", name="step", start_us=load.start_us, end_us=last_us, args={})
        windows[load.args["batch_id"]] = (window, update)
    return windows


async def test_the_critic_works_on_the_next_batch_while_the_actor_trains_this_one(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    config = overlapped(config_of(model, tmp_path / "run", num_steps=NUM_STEPS, logprob_tolerance=1e-4))
    summary, records = await run(config)
    found = spans(tmp_path / "run" / "trace.json")
    check_nesting(found)
    assert {"actor", "critic"} <= {span.row for span in found}
    assert {"generating", "paused"} <= {span.name for span in found}

    windows = actor_windows(found)
    assert len(windows) == NUM_STEPS
    in_window, in_update = [], []
    for batch, (window, update) in list(windows.items())[:-1]:
        work = [span for span in found if span.name in CRITIC_WORK and span.args["batch_id"] == batch + 1]
        assert len(work) == config.critic.num_updates + 1
        in_window.append(any(span.overlaps(window) for span in work))
        in_update.append(any(span.overlaps(update) for span in work))
    print(
        f"critic work on n+1 inside the actor's n, load to publish: {in_window}; inside its update alone: {in_update}"
    )
    assert sum(in_window) >= 0.8 * (NUM_STEPS - 1)

    assert [record["weight_version"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert all(record["policy/grad_norm"] > 0 for record in records)
    assert [record["overlap/held_slots"] for record in records][-1] == config.rollout.trajectories_per_step
    assert summary.num_steps_with_stale_tokens > 0
