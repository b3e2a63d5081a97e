"""One run from its configuration: build the parts, verify the first publish, train, evaluate, export, sum up.

`launch/` starts the processes and hands over the channels to the roles and the engine; nothing here starts a process.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_sao.algorithm.policy_loss import TrustRegion
from megatron_sao.channel import Channel
from megatron_sao.config import Config, PublishConfig, RolloutConfig
from megatron_sao.controller.clients import ActorClient, CriticClient, TracedChannel
from megatron_sao.controller.evaluate import Evaluation, evaluate
from megatron_sao.controller.loop import Parts, critic_only_phase, overlapped_loop, serial_loop
from megatron_sao.controller.model_file import vocab_size
from megatron_sao.controller.publish import Publisher
from megatron_sao.controller.report import Reporter, Summary
from megatron_sao.controller.step import StepSettings
from megatron_sao.data.buffer import TrajectoryBuffer
from megatron_sao.data.prompts import PromptStream
from megatron_sao.data.routed_experts import ExpertFiles, expert_directory
from megatron_sao.rollout.engine import Engine
from megatron_sao.rollout.episode import Episode, Limits
from megatron_sao.rollout.reward import RewardFunction, load_object
from megatron_sao.rollout.service import EpisodeRunner, RolloutService, run_prompts
from megatron_sao.rollout.traced import TracedEngine
from megatron_sao.sync.verify import fixed_prompt
from megatron_sao.trace import NoTrace, Trace
from megatron_sao.types import Prompt, WeightVersion

LOG = logging.getLogger(__name__)
POLICY_DIRECTORY = "hf"
CRITIC_DIRECTORY = "critic"
TRACE = "trace.json"
LOOPS = {"serial": serial_loop, "overlapped": overlapped_loop}
FIXED_PROMPT_TOKENS = 64
LOGPROB_TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float32": {"logprob_tolerance": 1e-4},
    "bfloat16": {"logprob_mean_tolerance": 0.5},
}
"""Where the configuration sets none. In bfloat16 a router that flips moves single tokens by 2 nats (docs/log.md)."""

Measure = Callable[..., Awaitable[Evaluation | None]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a user brings: prompts, an episode, a reward. Loaded from the import paths of the configuration."""

    prompts: PromptStream
    held_out: Sequence[Prompt]
    episode: Episode
    reward: RewardFunction


def load_work(config: Config) -> Work:
    """Needs no process of the run, so that what is wrong here is said before any is started.

    Raises:
        ValueError: a tokenizer that cannot be read, an import path that leads nowhere, too few prompts, a held-out
            prompt that is trained on as well.
    """
    rollout = config.rollout
    source: Sequence[Prompt] = load_object(rollout.prompts)(**rollout.prompts_args)
    reward = load_object(rollout.reward)
    if not inspect.iscoroutinefunction(reward):
        raise ValueError(f"rollout.reward = {rollout.reward!r} is not an `async def reward(prompt, trajectories)`")
    return Work(
        prompts=PromptStream(source, seed=config.run.seed, min_size=rollout.num_slots),
        held_out=_held_out(config, source),
        episode=load_object(rollout.episode)(_tokenizer(config.model.path), **rollout.episode_args),
        reward=reward,
    )


async def train(
    config: Config, work: Work, *, actor: Channel, critic: Channel, engine: Engine, run_directory: Path
) -> Summary:
    """Run SAO to its end. The policy is exported to RUN/hf, the critic to RUN/critic, the summary to RUN/summary.json.

    Raises:
        ValueError: what a person must change (the message says what).
        RuntimeError: a role, the engine or a publish failed.
    """
    region = TrustRegion(eps_low=config.algorithm.eps_low, eps_high=config.algorithm.eps_high)
    LOG.info("a token is trained on while its ratio is in %s", region)
    trace = Trace(run_directory / TRACE) if config.metrics.trace else NoTrace()
    actor, critic, engine = TracedChannel(actor, trace), TracedChannel(critic, trace), TracedEngine(engine, trace)
    runner = _runner(config.rollout, work, engine=engine)
    files = ExpertFiles(expert_directory(run_directory)) if config.actor.router_replay else None
    reporter = Reporter(run_directory, num_steps=config.run.num_steps, tensorboard=config.metrics.tensorboard)
    with closing(trace), closing(reporter), closing(files) if files else nullcontext():
        parts = _parts(
            config,
            actor=actor,
            critic=critic,
            engine=engine,
            work=work,
            runner=runner,
            reporter=reporter,
            trace=trace,
            files=files,
        )
        measure = partial(_evaluate, prompts=work.held_out, runner=runner, engine=engine, reporter=reporter)
        try:
            return await _train(config, parts, measure=measure, run_directory=run_directory)
        finally:
            await parts.service.stop(timeout_s=config.run.shutdown_timeout_s)


async def _train(config: Config, parts: Parts, *, measure: Measure, run_directory: Path) -> Summary:
    reporter = parts.reporter
    reporter.phase("first publish: every tensor of the engine is compared")
    await parts.publisher.first_publish()
    before = await measure(version=0)

    parts.service.start()
    await critic_only_phase(parts, config.critic)
    first_batch_id = config.critic.max_critic_only_steps
    loop = LOOPS[config.run.loop]
    version = await loop(parts, num_steps=config.run.num_steps, first_batch_id=first_batch_id)
    await parts.service.stop(timeout_s=config.run.shutdown_timeout_s)

    reporter.phase("exporting policy and critic")
    policy_directory, critic_directory = run_directory / POLICY_DIRECTORY, run_directory / CRITIC_DIRECTORY
    await parts.actor.export(policy_directory)
    await parts.critic.export(critic_directory)
    after = await measure(version=version)
    await parts.publisher.close()
    return reporter.summary(
        before=before,
        after=after,
        num_dropped=parts.buffer.num_dropped,
        policy_directory=policy_directory,
        critic_directory=critic_directory,
    )


async def _evaluate(
    *, version: WeightVersion, prompts: Sequence[Prompt], runner: EpisodeRunner, engine: Engine, reporter: Reporter
) -> Evaluation | None:
    if not prompts:
        return None
    reporter.phase(f"evaluating version {version} on {len(prompts)} held-out prompts")
    return await evaluate(
        prompts, run_episodes=partial(run_prompts, runner=runner), engine=engine, expected_version=version
    )


def _parts(
    config: Config,
    *,
    actor: Channel,
    critic: Channel,
    engine: Engine,
    work: Work,
    runner: EpisodeRunner,
    reporter: Reporter,
    trace: Trace,
    files: ExpertFiles | None,
) -> Parts:
    rollout = config.rollout
    buffer = TrajectoryBuffer(
        rollout.num_slots, max_token_lag=rollout.max_token_lag, on_free=files.remove if files else None
    )
    service = RolloutService(
        runner,
        prompts=work.prompts,
        buffer=buffer,
        max_consecutive_failures=rollout.max_consecutive_failures,
        slot_timeout_s=longest_step_s(config),
        expert_files=files,
    )
    prompt = fixed_prompt(vocab_size(Path(config.model.path)), min(FIXED_PROMPT_TOKENS, rollout.max_episode_tokens))
    return Parts(
        buffer=buffer,
        service=service,
        actor=ActorClient.of(actor, config.actor),
        critic=CriticClient.of(critic, config.critic),
        publisher=Publisher(
            [engine],
            actor,
            publish_settings(config),
            engine_ranks=config.engine.tensor,
            fixed_prompt=prompt,
            trace=trace,
        ),
        reporter=reporter,
        settings=StepSettings.of(config.algorithm, config.critic),
        episodes_per_step=rollout.trajectories_per_step,
        max_lag=rollout.max_lag,
        in_order=config.run.deterministic,
        episode_timeout_s=rollout.episode_timeout_s + rollout.reward_timeout_s,
        step_timeout_s=longest_step_s(config),
    )


def publish_settings(config: Config) -> PublishConfig:
    """The configuration's, with the tolerance that the model's dtype allows where none is set."""
    settings = config.publish
    if settings.logprob_tolerance is not None or settings.logprob_mean_tolerance is not None:
        return settings
    return settings.model_copy(update=dict(LOGPROB_TOLERANCES[config.model.dtype]))


def longest_step_s(config: Config) -> float:
    """The longest wait for a slot: an episode, every command of a step and a publish, each up to its deadline."""
    num_commands = 6 + config.critic.num_updates  # loads and drops of both roles, values, the actor's update
    command_s = max(config.actor.command_timeout_s, config.critic.command_timeout_s)
    publish = config.publish
    publish_s = 2 * (publish.first_timeout_s + 4 * publish.timeout_s + publish.max_pause_s)  # two attempts, the check
    episode_s = config.rollout.episode_timeout_s + config.rollout.reward_timeout_s
    return num_commands * command_s + publish_s + episode_s


def _runner(rollout: RolloutConfig, work: Work, *, engine: Engine) -> EpisodeRunner:
    return EpisodeRunner(
        engine=engine,
        episode=work.episode,
        reward=work.reward,
        limits=Limits(
            max_episode_tokens=rollout.max_episode_tokens,
            max_turn_tokens=rollout.max_turn_tokens,
            max_turns=rollout.max_turns,
        ),
        reward_range=rollout.reward_range,
        episode_timeout_s=rollout.episode_timeout_s,
        reward_timeout_s=rollout.reward_timeout_s,
    )


def _tokenizer(directory: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path = {directory!r} has no tokenizer that transformers can read: {error}") from error
    return tokenizer


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
