"""One run from its configuration: build the parts, verify the first publish, train, evaluate, export, sum up.

`launch/` starts the processes and hands over the channels to the roles and the engine; nothing here starts a process.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_sao.algorithm.policy_loss import TrustRegion
from megatron_sao.channel import Channel
from megatron_sao.config import Config, RolloutConfig
from megatron_sao.controller.clients import ActorClient, CriticClient
from megatron_sao.controller.evaluate import Evaluation, evaluate
from megatron_sao.controller.loop import Parts, critic_only_phase, serial_loop
from megatron_sao.controller.publish import Publisher
from megatron_sao.controller.report import Reporter, Summary
from megatron_sao.controller.step import StepSettings
from megatron_sao.data.buffer import TrajectoryBuffer
from megatron_sao.data.prompts import PromptStream
from megatron_sao.rollout.engine import Engine
from megatron_sao.rollout.episode import Limits
from megatron_sao.rollout.reward import load_object
from megatron_sao.rollout.service import EpisodeRunner, RolloutService
from megatron_sao.rollout.service import evaluate as run_prompts
from megatron_sao.sync.verify import fixed_prompt
from megatron_sao.types import Prompt, WeightVersion

LOG = logging.getLogger(__name__)
POLICY_DIRECTORY = "hf"
CRITIC_DIRECTORY = "critic"
FIXED_PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a user brings: prompts, an episode, a reward. Loaded from the import paths of the configuration."""

    prompts: PromptStream
    runner: EpisodeRunner
    held_out: Sequence[Prompt]


def load_work(config: Config, *, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> Work:
    """Raises ValueError: an import path that leads nowhere, too few prompts, a held-out prompt that is trained on."""
    rollout = config.rollout
    source: Sequence[Prompt] = load_object(rollout.prompts)(**rollout.prompts_args)
    held_out = _held_out(config, source)
    return Work(
        prompts=PromptStream(source, seed=config.run.seed, min_size=rollout.num_slots),
        runner=_runner(rollout, engine=engine, tokenizer=tokenizer),
        held_out=held_out,
    )


async def train(config: Config, *, actor: Channel, critic: Channel, engine: Engine, run_directory: Path) -> Summary:
    """Run SAO to its end. The policy is exported to RUN/hf, the critic to RUN/critic, the summary to RUN/summary.json.

    Raises:
        ValueError: what a person must change (the message says what).
        RuntimeError: a role, the engine or a publish failed.
    """
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    work = load_work(config, engine=engine, tokenizer=tokenizer)
    reporter = Reporter(run_directory, num_steps=config.run.num_steps, tensorboard=config.metrics.tensorboard)
    parts = _parts(config, actor=actor, critic=critic, engine=engine, work=work, reporter=reporter)
    region = TrustRegion(eps_low=config.algorithm.eps_low, eps_high=config.algorithm.eps_high)
    LOG.info("a token is trained on while its ratio is in %s", region)
    try:
        return await _train(config, parts, work, engine=engine, run_directory=run_directory)
    finally:
        reporter.close()
        await parts.service.stop(timeout_s=config.run.shutdown_timeout_s)


async def _train(config: Config, parts: Parts, work: Work, *, engine: Engine, run_directory: Path) -> Summary:
    reporter = parts.reporter
    measure = partial(_evaluate, work=work, engine=engine, concurrency=config.rollout.num_slots)

    reporter.phase("first publish: every tensor of the engine is compared")
    await parts.publisher.first_publish()
    reporter.phase("evaluating the start policy")
    before = await measure(version=0)

    parts.service.start()
    await critic_only_phase(parts, config.critic)
    version = await serial_loop(
        parts, num_steps=config.run.num_steps, first_batch_id=config.critic.max_critic_only_steps
    )
    await parts.service.stop(timeout_s=config.run.shutdown_timeout_s)

    reporter.phase(f"evaluating version {version}")
    after = await measure(version=version)
    reporter.phase("exporting policy and critic")
    policy_directory, critic_directory = run_directory / POLICY_DIRECTORY, run_directory / CRITIC_DIRECTORY
    await parts.actor.export(policy_directory)
    await parts.critic.export(critic_directory)
    await parts.publisher.close()
    return reporter.summary(
        before=before,
        after=after,
        num_dropped=parts.buffer.num_dropped,
        policy_directory=policy_directory,
        critic_directory=critic_directory,
    )


async def _evaluate(*, version: WeightVersion, work: Work, engine: Engine, concurrency: int) -> Evaluation | None:
    if not work.held_out:
        return None
    run_episodes = partial(run_prompts, runner=work.runner, concurrency=concurrency)
    return await evaluate(work.held_out, run_episodes=run_episodes, engine=engine, expected_version=version)


def _parts(config: Config, *, actor: Channel, critic: Channel, engine: Engine, work: Work, reporter: Reporter) -> Parts:
    rollout = config.rollout
    buffer = TrajectoryBuffer(rollout.num_slots, max_token_lag=rollout.max_token_lag)
    service = RolloutService(
        work.runner,
        prompts=work.prompts,
        buffer=buffer,
        max_consecutive_failures=rollout.max_consecutive_failures,
    )
    prompt = fixed_prompt(vocab_size(Path(config.model.path)), min(FIXED_PROMPT_TOKENS, rollout.max_episode_tokens))
    return Parts(
        buffer=buffer,
        service=service,
        actor=ActorClient.of(actor, config.actor),
        critic=CriticClient.of(critic, config.critic),
        publisher=Publisher(engine, actor, config.publish, engine_ranks=config.engine.tensor, fixed_prompt=prompt),
        reporter=reporter,
        settings=StepSettings.of(config.algorithm, config.critic),
        episodes_per_step=rollout.trajectories_per_step,
        max_lag=rollout.max_lag,
        in_order=config.run.deterministic,
        episode_timeout_s=rollout.episode_timeout_s + rollout.reward_timeout_s,
    )


def _runner(rollout: RolloutConfig, *, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> EpisodeRunner:
    return EpisodeRunner(
        engine=engine,
        episode=load_object(rollout.episode)(tokenizer, **rollout.episode_args),
        reward=load_object(rollout.reward),
        limits=Limits(
            max_episode_tokens=rollout.max_episode_tokens,
            max_turn_tokens=rollout.max_turn_tokens,
            max_turns=rollout.max_turns,
        ),
        reward_range=rollout.reward_range,
        episode_timeout_s=rollout.episode_timeout_s,
        reward_timeout_s=rollout.reward_timeout_s,
    )


def _held_out(config: Config, source: Sequence[Prompt]) -> Sequence[Prompt]:
    evaluation = config.evaluation
    if evaluation is None:
        return ()
    prompts: Sequence[Prompt] = load_object(evaluation.prompts)(**evaluation.prompts_args)
    if len(prompts) < evaluation.num_prompts:
        raise ValueError(
            f"evaluation.prompts gives {len(prompts)} prompts, evaluation.num_prompts asks for {evaluation.num_prompts}"
        )
    held_out = prompts[: evaluation.num_prompts]
    trained = {prompt.messages for prompt in source}
    shared = [prompt.id for prompt in held_out if prompt.messages in trained]
    if shared:
        raise ValueError(f"{len(shared)} held-out prompts are trained on as well, the first is {shared[0]!r}")
    return held_out


def vocab_size(model_directory: Path) -> int:
    """Of the model, not of the tokenizer, which may have fewer."""
    return int(json.loads((model_directory / "config.json").read_text(encoding="utf-8"))["vocab_size"])
