"""One frozen record per part, read from TOML. No torch: any tool can read a config.

`load(path, overrides)` is the only reader. Only the entry point sees the whole `Config`; every other module takes the
record or the values it needs. A validator is named as the sentence that it enforces.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
"""`package.module:name`."""
Recompute = Literal["none", "selective", "full"]
LOGITS_TOKENS = 1024
"""Default of actor.logits_tokens."""
ROUTER = "*.mlp.gate.*"  # HF names of the routers' tensors


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunConfig(Part):
    directory: str  # everything that a run writes lies below it
    num_steps: PositiveInt  # actor updates
    seed: NonNegativeInt = 0  # of the order of prompts and of the ranks
    loop: Literal["serial", "overlapped"] = "serial"  # overlapped: the critic is one batch ahead of the actor
    deterministic: bool = False  # batches in admission order, not in order of completion
    shutdown_timeout_s: PositiveFloat = 15.0  # for all processes to end


class ModelConfig(Part):
    path: str  # HF directory of the start policy: config.json, safetensors, tokenizer
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the parameters; main parameters are always float32
    approximate_sparse_attention: bool = False  # sequences above index_topk, trained with dense attention


class LayoutConfig(Part):
    """Ranks of one Megatron group, tensor ranks next to each other, pipeline stages outermost.

    In one pipeline stage, `tensor` divides the dense layers, which have data * context copies; expert_tensor * expert
    divides the experts, which have expert_data copies. `context` divides the tokens of a row.
    """

    num_ranks: PositiveInt = 1  # processes, one device each
    tensor: PositiveInt = 1  # tensor-parallel size; sequence parallel above 1
    expert: PositiveInt = 1  # expert-parallel size
    expert_tensor: PositiveInt = 1  # tensor-parallel size of each expert
    pipeline: PositiveInt = 1  # stages; layers are shared out as evenly as they can be
    virtual_stages: PositiveInt = 1  # model chunks on each pipeline rank, in the interleaved schedule
    context: PositiveInt = 1  # ranks that share each packed row; on a GPU with Transformer Engine only

    @model_validator(mode="after")
    def parallel_sizes_divide_the_ranks(self) -> "LayoutConfig":
        for names in (("tensor", "context", "pipeline"), ("expert_tensor", "expert", "pipeline")):
            sizes = {name: getattr(self, name) for name in names}
            product = math.prod(sizes.values())
            if self.num_ranks % product:
                written = " * ".join(name for name, size in sizes.items() if size > 1)
                raise ValueError(
                    f"{written} = {product} does not divide num_ranks = {self.num_ranks}: num_ranks must be a multiple "
                    f"of {product}, or the product one of {divisors(self.num_ranks, up_to=self.num_ranks)}"
                )
        return self

    @model_validator(mode="after")
    def virtual_stages_need_a_pipeline(self) -> "LayoutConfig":
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise ValueError(f"virtual_stages = {self.virtual_stages} with pipeline = 1: they need pipeline >= 2")
        return self

    @property
    def data(self) -> int:
        return self.num_ranks // (self.tensor * self.context * self.pipeline)

    @property
    def expert_data(self) -> int:
        return self.num_ranks // (self.expert_tensor * self.expert * self.pipeline)


def divisors(number: int, *, up_to: int = 64) -> str:
    """As errors name them."""
    return ", ".join(str(n) for n in range(1, min(number, up_to) + 1) if number % n == 0)


class OptimizerConfig(Part):
    """Adam. The rate rises linearly over `warmup_updates` of this optimizer, then is constant."""

    learning_rate: NonNegativeFloat  # after the warm-up
    clip_norm: PositiveFloat  # of the gradient over all trained parameters
    warmup_updates: NonNegativeInt = 10  # of this optimizer; then the rate is constant
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.98), strict=False)  # of Adam
    eps: PositiveFloat = 1e-8  # of Adam
    weight_decay: NonNegativeFloat = 0.1  # none on norms, biases and the value head
    distributed: bool = True  # Megatron's distributed optimizer: states sharded over data-parallel ranks
    overlap: bool = False  # gradient reduction and (if distributed) parameter gather beside the computation


class RoleConfig(Part):
    """What actor and critic have in common."""

    layout: LayoutConfig = LayoutConfig()
    optimizer: OptimizerConfig
    freeze: tuple[str, ...] = Field(default=(), strict=False)  # globs over HF names; one without a match is an error
    max_tokens_per_micro_batch: PositiveInt = 8192  # the packing budget; the longest trajectory must fit
    recompute: Recompute = "none"  # in the backward: core attention's, or whole layers'
    num_threads: PositiveInt = 1  # per rank, on a CPU
    command_timeout_s: PositiveFloat = 1800.0  # the longest single command (an update, the values, a load)
    hidden_dropout: float = 0.0  # nothing else is accepted
    attention_dropout: float = 0.0  # nothing else is accepted

    @model_validator(mode="after")
    def dropout_is_zero_in_training(self) -> "RoleConfig":
        if self.hidden_dropout or self.attention_dropout:
            raise ValueError(
                f"dropout must be 0 (hidden {self.hidden_dropout}, attention {self.attention_dropout}): the ratio to "
                "the rollout's log-probs is that of one and the same distribution"
            )
        return self

    @property
    def frozen_patterns(self) -> tuple[str, ...]:
        return self.freeze


class ActorConfig(RoleConfig):
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6, clip_norm=1.0)
    logits_tokens: PositiveInt = LOGITS_TOKENS  # action tokens of a row whose logits are in memory at once
    router_replay: bool = False  # train with the experts that the engine chose at rollout (R3)


class CriticConfig(RoleConfig):
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6, clip_norm=10.0)
    init: str = "policy"  # "policy", or the directory of an exported critic
    freeze: tuple[str, ...] = Field(default=("*.self_attn.*",), strict=False)  # globs over HF names
    train_router: bool = True  # false: frozen like attention
    num_updates: PositiveInt = 2  # K, per actor update, on the same batch
    values: Literal["after_updates", "before_updates"] = "after_updates"  # which critic the advantages use
    critic_only_steps: NonNegativeInt = 10  # before actor step 0, at least
    min_explained_variance: float | None = None  # the critic-only phase goes on until it is exceeded
    max_critic_only_steps: NonNegativeInt = 50  # then an error
    continue_below_min_explained_variance: bool = False  # no error then

    @property
    def frozen_patterns(self) -> tuple[str, ...]:
        return self.freeze if self.train_router else (*self.freeze, ROUTER)

    @model_validator(mode="after")
    def the_critic_only_phase_can_end(self) -> "CriticConfig":
        if self.max_critic_only_steps < self.critic_only_steps:
            raise ValueError(
                f"max_critic_only_steps = {self.max_critic_only_steps} is below critic_only_steps = "
                f"{self.critic_only_steps}"
            )
        return self


class AlgorithmConfig(Part):
    """docs/method.md. The epsilons are distances from 1: a ratio is trusted in (1-eps_low, 1+eps_high)."""

    eps_low: Annotated[float, Field(gt=0, lt=1)]  # 0.3: a ratio is trusted above 0.7
    eps_high: PositiveFloat  # 5.0: a ratio is trusted below 6.0
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0  # discount per action token
    alpha: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.5  # lambda_policy = 1 - 1/(alpha * l), l actions
    lambda_critic: Annotated[float, Field(ge=0, le=1)] = 1.0  # 1: the target is the return
    whiten_advantages: bool = False  # mean 0, deviation 1 over the step's action tokens
    advantage: Literal["gae", "zero"] = "gae"  # "zero" is a control: everything runs, nothing is learned


class RolloutConfig(Part):
    prompts: ImportPath  # callable(**prompts_args) -> Sequence[Prompt]
    prompts_args: dict[str, Any] = {}  # keyword arguments
    episode: ImportPath  # callable(tokenizer, **episode_args) -> Episode
    episode_args: dict[str, Any] = {}  # keyword arguments
    reward: ImportPath  # async callable(prompt, trajectories) -> Reward
    reward_range: tuple[float, float] = Field(default=(0.0, 1.0), strict=False)  # a reward outside is an error
    trajectories_per_step: PositiveInt = 128  # episodes a step takes
    max_lag: NonNegativeInt = 1  # slots = (max_lag + 1) * trajectories_per_step
    max_token_lag: NonNegativeInt | None = None  # drops a trajectory whose oldest token is older
    max_episode_tokens: PositiveInt  # prompt, actions and observations of one trajectory
    max_turn_tokens: PositiveInt  # sampled in one turn
    max_turns: PositiveInt = 1  # after the last one the episode is scored as it is
    temperature: float = 1.0  # nothing else is accepted
    top_p: float = 1.0  # nothing else is accepted
    episode_timeout_s: PositiveFloat = 3600.0  # then it is dropped and counted
    reward_timeout_s: PositiveFloat = 60.0  # then its episode is dropped and counted
    max_consecutive_failures: PositiveInt = 16  # broken episodes in a row before the run gives up

    @model_validator(mode="after")
    def sampling_is_from_the_models_own_distribution(self) -> "RolloutConfig":
        if self.temperature != 1.0 or self.top_p != 1.0:
            raise ValueError(
                f"temperature = {self.temperature}, top_p = {self.top_p}: both must be 1, since the logged log-prob "
                "must be that of the sampling distribution"
            )
        return self

    @model_validator(mode="after")
    def rewards_have_a_range(self) -> "RolloutConfig":
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range = [{low}, {high}] holds no two rewards: give [lowest, highest]")
        return self

    @model_validator(mode="after")
    def a_turn_fits_in_an_episode(self) -> "RolloutConfig":
        if self.max_turn_tokens > self.max_episode_tokens:
            raise ValueError(
                f"max_turn_tokens = {self.max_turn_tokens} exceeds max_episode_tokens = {self.max_episode_tokens}"
            )
        return self

    @property
    def num_slots(self) -> int:
        return (self.max_lag + 1) * self.trajectories_per_step


class EngineConfig(Part):
    """One SGLang server, started, watched and stopped by the run."""

    host: str = "127.0.0.1"  # what the server binds
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free one
    tensor: PositiveInt = 1  # tensor-parallel size
    max_total_tokens: PositiveInt | None = None  # KV cache; None: what SGLang finds
    cpu_cores: str | None = None  # on a CPU: "last", "1", or "0|1" for tensor = 2; none: not bound
    start_timeout_s: PositiveFloat = 600.0  # until it answers; also for the ranks to connect
    request_timeout_s: PositiveFloat = 1800.0  # of one generation
    control_timeout_s: PositiveFloat = 60.0  # pause, flush, begin, end, continue
    extra_args: tuple[str, ...] = Field(default=(), strict=False)  # of sglang.launch_server


class PublishConfig(Part):
    pause: Literal["retract", "in_place"] = "retract"  # running episodes' KV: computed again, or kept
    sender: Literal["gather", "direct"] = "direct"  # all from rank 0, or each tensor from the first rank that holds it
    bucket_bytes: PositiveInt = 64 * 1024 * 1024  # one broadcast; a larger tensor gets a bucket of its own
    timeout_s: PositiveFloat = 300.0  # of each phase: plan, connect, and each bucket's gather, send and load
    first_timeout_s: PositiveFloat = 900.0  # of the first connect and a group's first buckets, where NCCL compiles
    max_pause_s: PositiveFloat = 240.0  # the longest that engines stand still; SGLang ends itself after 300 s
    verify_first: bool = True  # checksum, reset, publish version 0, compare
    logprob_tolerance: PositiveFloat | None = None  # max |engine - actor| after a publish, nats; none: 1e-4 in float32
    logprob_mean_tolerance: PositiveFloat | None = None  # mean |engine - actor|; none: 0.5 in bfloat16


class EvaluationConfig(Part):
    """Held-out prompts, run at temperature 1 before the first and after the last step."""

    prompts: ImportPath  # callable(**prompts_args) -> Sequence[Prompt]; none of them may be trained on
    prompts_args: dict[str, Any] = {}  # keyword arguments
    num_prompts: Annotated[int, Field(ge=2)] = 256  # an interval needs two


class MetricsConfig(Part):
    tensorboard: bool = True  # written where the package is installed
    trace: bool = True  # RUN/trace.json, in Chrome's format: a row for each role, engine and the publish


class ClusterConfig(Part):
    """The machines that `sao plan` plans for, and how a run uses the one that it is on."""

    gpu: Literal["A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB"] = "H100-80GB"
    gpus_per_node: PositiveInt = 8
    share_gpus: bool | None = None  # roles and engine, where GPUs are too few; none: if each role has one rank


class Config(Part):
    run: RunConfig
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    engine: EngineConfig = EngineConfig()
    publish: PublishConfig = PublishConfig()
    evaluation: EvaluationConfig | None = None
    metrics: MetricsConfig = MetricsConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def the_longest_trajectory_fits_in_a_micro_batch(self) -> "Config":
        for name, role in (("actor", self.actor), ("critic", self.critic)):
            if role.max_tokens_per_micro_batch < self.rollout.max_episode_tokens:
                raise ValueError(
                    f"{name}.max_tokens_per_micro_batch = {role.max_tokens_per_micro_batch} is below "
                    f"rollout.max_episode_tokens = {self.rollout.max_episode_tokens}"
                )
        return self

    @model_validator(mode="after")
    def the_overlapped_loop_has_batches_ahead(self) -> "Config":
        if self.run.loop == "overlapped" and self.rollout.max_lag == 0:
            raise ValueError(
                'run.loop = "overlapped" with rollout.max_lag = 0 overlaps nothing: set max_lag = 2, or 1 where '
                "episodes are short beside a step"
            )
        return self

    @model_validator(mode="after")
    def a_critic_lambda_below_one_needs_values_before_the_updates(self) -> "Config":
        if self.algorithm.lambda_critic < 1 and self.critic.values != "before_updates":
            raise ValueError(
                f"algorithm.lambda_critic = {self.algorithm.lambda_critic} makes targets from values: set "
                'critic.values = "before_updates"'
            )
        return self


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file and apply `key.path=value` overrides (the value is TOML; a bare word is a string).

    Raises:
        ValueError: file missing or not TOML, unknown or missing key (the known ones are listed), value out of range.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _apply(data, override)
    return parse(data, source=str(path))


def parse(data: Mapping[str, Any], *, source: str) -> Config:
    """Validate a config given as nested mappings; `source` names it in errors."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise ValueError(f"{source}: " + "; ".join(lines)) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"override {override!r} is not of the form key.path=value")
    *parents, last = key.strip().split(".")
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ValueError(f"override {override!r}: {parent!r} is a value, not a table")
    node[last] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    where = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = ", ".join(sorted(_part_at(location[:-1]).model_fields))
        return f"unknown key {where!r}; known here: {known}"
    if item["type"] == "missing":
        return f"missing key {where!r}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return (
        f"{where}: {message} (got {item['input']!r})"
        if item["type"] != "value_error"
        else f"{where or 'config'}: {message}"
    )


def _part_at(location: list[str]) -> type[BaseModel]:
    part: type[BaseModel] = Config
    for name in location:
        annotation = part.model_fields[name].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        part = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return part
