"""The run configuration: fixed sections, every key with its unit, range and default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """The base checkpoint."""

    name: str = Field("smollm2-135m", description="embedded name, local folder, or Hub id (needs revision)")
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = Field(
        None, description="commit of a Hub id, 40 hex digits"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = Field(
        "auto", description="auto: bfloat16 only where the processor computes it natively"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="where to train")


class LoraSection(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

    rank: PositiveInt = Field(16, description="rank r of every adapter")
    alpha: Annotated[float, Field(gt=0, le=1e6)] = Field(32.0, description="scale alpha; adapters add alpha/r * B A")
    dropout: BelowOne = Field(
        0.0, description="adapter dropout; 0 keeps the sampler and the trainer equal, 1 would drop every adapter"
    )
    targets: Literal["all-linear"] = Field("all-linear", description="which modules get an adapter")


class OptimizerSection(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Positive = Field(2e-4, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="decay after warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up")
    weight_decay: NonNegative = Field(0.0, description="decoupled weight decay")
    beta1: BelowOne = Field(0.9, description="first-moment decay; at 1 no gradient would ever count")
    beta2: BelowOne = Field(0.99, description="second-moment decay; short runs want less than 0.999")
    epsilon: Positive = 1e-8
    max_grad_norm: Positive = Field(1.0, description="global L2 norm the gradient is clipped to")


class TrainSection(Section):
    """The GRPO loop (Shao et al. 2024, arXiv 2402.03300)."""

    steps: PositiveInt = Field(25, description="optimizer batches; absolute, also after a resume")
    tasks_per_step: PositiveInt = Field(4, description="groups per step")
    group_size: Annotated[int, Field(ge=2)] = Field(8, description="rollouts per task; one has no baseline")
    minibatches: PositiveInt = Field(1, description="optimizer updates per batch of rollouts")
    loss: Literal["dapo"] = Field("dapo", description="mean over all active tokens of the batch")
    advantage: Literal["mean", "mean_std"] = Field("mean", description="reward - group mean, optionally / std")
    clip_low: Fraction = Field(0.2, description="lower clip of the probability ratio; acts with minibatches > 1")
    clip_high: Fraction = Field(0.28, description="upper clip (DAPO, arXiv 2503.14476)")
    entropy_beta: NonNegative = Field(
        0.003, description="weight of the mean token entropy, in nats, as a bonus; keeps a small model from one answer"
    )
    mask_truncated: bool = Field(False, description="leave rollouts cut by max_tokens out of the loss")
    balance_labels: bool = Field(True, description="sample tasks so that labels come equally often")
    resample_groups: Annotated[int, Field(ge=0)] = Field(
        0, description="extra groups drawn per step to replace groups without spread"
    )
    microbatch_tokens: PositiveInt = Field(6144, description="token budget of one forward and backward pass")
    seed: int = Field(0, ge=0, description="decides tasks, sampling and adapter initialisation")


class SamplingSection(Section):
    """How rollouts are sampled; pure temperature, so ratios are unbiased."""

    max_tokens: PositiveInt = Field(64, description="tokens per turn")
    temperature: Positive = 1.0
    max_turns: Annotated[int, Field(ge=1, le=1)] = Field(1, description="turns per episode; one in this version")
    context: PositiveInt = Field(2048, description="tokens of prompt and completion together")


class EnvSampling(Section):
    """Per-environment overrides of [sampling]."""

    max_tokens: PositiveInt | None = None
    temperature: Positive | None = None


class EnvSection(Section):
    """One training environment."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="name in `harness env list`; without dots")
    weight: Positive = Field(1.0, description="share of the tasks of a step, relative to the other environments")
    prompt: str = Field("shipped", description="`shipped`, or the id of a prompt in rl/prompts/<env>/")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment; training only")
    sampling: EnvSampling = EnvSampling()


class EvalSection(Section):
    """Empty: what is evaluated, and how, is frozen in CONTEXT.md."""


class BackendSection(Section):
    """Who executes the run."""

    name: Literal["local"] = "local"
    engine: Literal["transformers"] = "transformers"
    threads: Annotated[int, Field(ge=0)] = Field(0, description="processor threads; 0 takes all")


class CheckpointSection(Section):
    """What a resume needs."""

    interval: PositiveInt = Field(5, description="steps between full checkpoints")
    keep: PositiveInt = Field(2, description="full checkpoints kept; adapters at eval steps are always kept")


class BudgetSection(Section):
    """Limits that stop a run with exit code 4."""

    wall_clock_s: Positive | None = Field(None, description="seconds of one attempt")
    tokens: PositiveInt | None = Field(None, description="sampled tokens of the whole run")


class RunConfig(Section):
    """A whole run: one hypothesis, tested once."""

    parent: str | None = None
    hypothesis: str
    replicate_of: str | None = Field(None, description="run whose config this repeats with another seed")
    lever: str | None = Field(None, description="name that declares several changes one lever")
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    sampling: SamplingSection = SamplingSection()
    env: tuple[EnvSection, ...] = Field((), description="[[env]] tables; at least one")
    eval: EvalSection = EvalSection()
    backend: BackendSection = BackendSection()
    checkpoint: CheckpointSection = CheckpointSection()
    budget: BudgetSection = BudgetSection()

    @model_validator(mode="after")
    def _distinct_environments(self) -> RunConfig:
        ids = [env.id for env in self.env]
        if len(set(ids)) != len(ids):
            raise ValueError("two [[env]] tables name the same environment")
        return self

    @model_validator(mode="after")
    def _room_for_a_prompt(self) -> RunConfig:
        longest = max([self.sampling.max_tokens, *(env.sampling.max_tokens or 0 for env in self.env)])
        if self.sampling.context <= longest:
            raise ValueError(
                f"sampling.context = {self.sampling.context} leaves no room for a prompt beside a completion of "
                f"max_tokens = {longest}"
            )
        return self
