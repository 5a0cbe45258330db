"""Checks of one model before anyone spends money on it: does it train and sample as the same model?

Every check compares two ways to one number on the model itself: the tree pass of the trainer, the
sampler, transformers' own attention on each sequence alone, and plain PEFT after a trip to the disk.
The trainer's parts are passed in, so what is checked is what trains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from harness.config.schema import LoraSection
from harness.core.errors import ConfigError
from harness.core.types import Completion, Message
from harness.inference.agreement import TOLERANCE, compare
from harness.inference.chat import render_chat, render_suffix
from harness.inference.engine import TransformersEngine, merged_adapter
from harness.inference.lora import Adapted, adapted_weights, attach_lora, load_adapter, save_adapter, trainable
from harness.inference.models import LoadedModel
from harness.inference.tree import ATTENTION, TreeBatch, build_tree

WINDOW = 16
"""Sliding windows are checked at this width, so that short prompts leave it."""
B_SCALE = 0.02
"""Standard deviation of B in the adapters that are checked: an effect, but no other model."""
SAMPLES, LENGTH = 3, 12
QUESTIONS = (
    "What is the capital of France?",
    "Name a colour of the rainbow.",
    "How many legs does a spider have, and how many an ant?",
)
REPLY = "Seventeen sparrows."


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer's own parts, passed in because training is a layer above.

    Args:
        tree_logprobs: model, layout and temperatures to log probabilities and entropies.
        prepare: what is done to a model with adapters before it trains.
        logit_rows: rows of the vocabulary's size in float32 that exist at the same time.
    """

    tree_logprobs: Callable[[Any, TreeBatch, Tensor], tuple[Tensor, Tensor]]
    prepare: Callable[[Any], object]
    logit_rows: int


@dataclass(frozen=True, slots=True)
class Check:
    """One answer: what was compared, whether it holds, and the numbers it rests on."""

    name: str
    passed: bool
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Subject:
    """The model under test with its adapters, prompts and sampled completions.

    Args:
        prompts: token ids; they share their first tokens.
        rows: per prompt the completions that the engine sampled.
    """

    loaded: LoadedModel
    wrapped: PeftModel
    trainer: Trainer
    prompts: list[list[int]]
    rows: list[list[Completion]] = field(default_factory=list)

    @property
    def causal_lm(self) -> Any:
        """The transformers model inside the adapters."""
        return self.wrapped.get_base_model()

    @property
    def dtype(self) -> torch.dtype:
        """Of log probabilities."""
        return torch.promote_types(self.loaded.dtype, torch.float32)

    def sample(self) -> list[list[Completion]]:
        """Return completions of the policy as it is, drawn by the engine."""
        seeds = [[100 * i + j for j in range(SAMPLES)] for i in range(len(self.prompts))]
        engine = TransformersEngine(self.loaded, self.wrapped)
        return engine.generate(self.prompts, SAMPLES, LENGTH, 1.0, seeds)

    def sequences(self) -> list[tuple[list[int], tuple[int, ...]]]:
        """Return (prompt, completion) of every row, in layout order."""
        return [(p, row.token_ids) for p, rows in zip(self.prompts, self.rows, strict=True) for row in rows]

    def plain(self) -> Tensor:
        """Return the log probabilities of all rows, each from its own pass with transformers' own attention."""
        self.causal_lm.set_attn_implementation("eager")
        pieces = []
        for prompt, completion in self.sequences():
            ids = torch.tensor([[*prompt, *completion]], device=self.loaded.device)
            logits = self.causal_lm(input_ids=ids, use_cache=False).logits
            pieces.append(self._chosen(logits[0], ids[0], len(prompt)))
        return torch.cat(pieces)

    def padded(self) -> Tensor:
        """Return the same from one batch of left-padded rows with a mask and positions."""
        self.causal_lm.set_attn_implementation("eager")
        rows = [[*prompt, *completion] for prompt, completion in self.sequences()]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=self.loaded.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.loaded.device)
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        logits = self.causal_lm(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        pieces = []
        for index, (prompt, _) in enumerate(self.sequences()):
            skip = longest - len(rows[index])
            pieces.append(self._chosen(logits[index, skip:], ids[index, skip:], len(prompt)))
        return torch.cat(pieces)

    def tree(self, packed: bool) -> Tensor:
        """Return the same from the trainer: all prompts in one pass, or one pass per prompt."""
        self.causal_lm.set_attn_implementation(ATTENTION)
        ids = [[row.token_ids for row in rows] for rows in self.rows]
        if packed:
            return self._tree(self.prompts, ids)
        return torch.cat([self._tree([prompt], [own]) for prompt, own in zip(self.prompts, ids, strict=True)])

    def _tree(self, prompts: list[list[int]], ids: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        tree = build_tree(prompts, ids, self.loaded.device)
        tokens = sum(len(row) for rows in ids for row in rows)
        logprobs, _ = self.trainer.tree_logprobs(
            self.causal_lm, tree, torch.ones(tokens, device=self.loaded.device, dtype=self.dtype)
        )
        return logprobs

    def _chosen(self, logits: Tensor, ids: Tensor, prompt: int) -> Tensor:
        log_all = torch.log_softmax(logits[prompt - 1 : -1].to(self.dtype), dim=-1)
        return log_all.gather(1, ids[prompt:, None])[:, 0]


def check_model(loaded: LoadedModel, section: LoraSection, trainer: Trainer, seed: int = 0) -> Iterator[Check]:
    """Yield one check after the other; the model is left without adapters at the end.

    Args:
        loaded: the base model with its tokenizer.
        section: rank and alpha of the adapters that are tried on it.
        trainer: the trainer's own parts.
        seed: of the adapters' random numbers.
    """
    yield _weights(loaded)
    yield _chat_template(loaded)
    yield _end_of_turn(loaded)
    try:
        wrapped = attach_lora(loaded.model, section, seed)
    except ConfigError as error:
        yield Check("adapters", False, error.message)
        return
    trainer.prepare(wrapped)
    subject = Subject(loaded, wrapped, trainer, _prompts(loaded, seed))
    yield _adapters(subject)
    subject.rows = subject.sample()
    fresh = _gradients(subject)
    _fill(subject, seed)
    subject.rows = subject.sample()
    yield _gradient(subject, fresh)
    with torch.no_grad():
        yield from _passes(subject)
        yield _sliding_window(subject)
        yield _effect(subject)
        yield _merged(subject)
        yield _round_trip(subject)


def _weights(loaded: LoadedModel) -> Check:
    parameters = list(loaded.model.named_parameters())
    count = sum(parameter.numel() for _, parameter in parameters)
    broken = [name for name, parameter in parameters if not torch.isfinite(parameter).all()]
    detail = f"{loaded.model.config.model_type}, {count:,} parameters in {str(loaded.dtype).removeprefix('torch.')}"
    if broken:
        detail += f"; numbers that are not finite in {broken[0]} and {len(broken) - 1} more"
    return Check("weights", not broken, detail, {"parameters": count, "not_finite": len(broken)})


_OPENING = (("system", "Answer in one word."), ("user", QUESTIONS[0]))


def _chat_template(loaded: LoadedModel) -> Check:
    """Ask for the ids between two turns: they exist when a later turn's prompt begins with the earlier ones."""
    name = "chat_template"
    try:
        history = [Message(role, content) for role, content in _OPENING]
        prompt = len(render_chat(loaded.tokenizer, history))
    except (ConfigError, AttributeError) as error:
        return Check(name, False, str(error))
    try:
        between = len(render_suffix(loaded.tokenizer, history, [Message("user", QUESTIONS[1])], loaded.eos_ids))
    except ConfigError as error:
        return Check(name, False, f"episodes of one turn only: {error.message}", {"prompt": prompt})
    detail = f"a later turn begins with the earlier ones as they were sampled; {between} tokens stand between two turns"
    return Check(name, True, detail, {"prompt": prompt, "between": between})


def _end_of_turn(loaded: LoadedModel) -> Check:
    """Look whether the token that the template writes after a reply is one that ends a completion."""
    name, ids = "end_of_turn", sorted(loaded.eos_ids)
    numbers = {"ids": len(ids)}
    if not getattr(loaded.tokenizer, "chat_template", None):
        return Check(name, bool(ids), f"ids {ids}; no template to compare with", numbers)
    chat = [*_OPENING, ("assistant", REPLY), ("user", QUESTIONS[1])]
    messages = [{"role": role, "content": content} for role, content in chat]
    try:
        text = str(loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of its own and raises what it likes
        return Check(name, False, f"the template refuses a second turn: {error}", numbers)
    after = loaded.tokenizer(text.partition(REPLY)[2], add_special_tokens=False)["input_ids"]
    closing = int(after[0]) if after else -1
    token = loaded.tokenizer.convert_ids_to_tokens(closing) if after else ""
    where = "is among" if closing in loaded.eos_ids else "is NOT among"
    detail = f"the template closes a reply with {token!r} (id {closing}), which {where} the ids that end one: {ids}"
    return Check(name, closing in loaded.eos_ids, detail, numbers | {"closing_id": closing})


def _prompts(loaded: LoadedModel, seed: int) -> list[list[int]]:
    """Return prompts with a shared beginning: the template's, or random ids without one."""
    try:
        chats = [(Message("system", "Answer in a few words."), Message("user", question)) for question in QUESTIONS]
        return [render_chat(loaded.tokenizer, chat) for chat in chats]
    except (ConfigError, AttributeError):  # no tokenizer, or no template that takes these roles
        generator = torch.Generator().manual_seed(seed)
        size = loaded.model.config.vocab_size
        ids = torch.randint(0, size, (len(QUESTIONS), 32), generator=generator)
        ids[:, :20] = ids[0, :20]
        return [row[: 26 + 2 * index].tolist() for index, row in enumerate(ids)]


def kinds(weights: Sequence[Adapted]) -> dict[str, list[Adapted]]:
    """Group adapted weights by their name inside a block."""
    groups: dict[str, list[Adapted]] = {}
    for weight in weights:
        groups.setdefault(weight.kind, []).append(weight)
    return groups


def _adapters(subject: Subject) -> Check:
    """List what has an adapter; `attach_lora` has refused to leave a matrix out."""
    groups = kinds(adapted_weights(subject.wrapped))
    numbers: dict[str, float] = {}
    for kind, own in groups.items():
        numbers |= {f"{kind}.count": len(own), f"{kind}.parameters": sum(weight.parameters for weight in own)}
    total = sum(parameter.numel() for parameter in trainable(subject.wrapped).values())
    listed = sum(weight.parameters for own in groups.values() for weight in own)
    detail = f"{total:,} parameters on " + ", ".join(f"{kind} ×{len(own)}" for kind, own in groups.items())
    return Check("adapters", total == listed, detail, numbers | {"parameters": total})


def _fill(subject: Subject, seed: int) -> None:
    """Give every adapter an effect: B drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapted_weights(subject.wrapped):
            weight.b.copy_(B_SCALE * torch.randn(weight.b.shape, generator=generator))


@dataclass(slots=True)
class _Gradients:
    """Of one backward pass: the largest absolute number of each factor's gradient (NaN when one is not finite)."""

    a: dict[str, float] = field(default_factory=dict)
    b: dict[str, float] = field(default_factory=dict)
    experts: int = 0
    experts_touched: int = 0


def _gradients(subject: Subject) -> _Gradients:
    """Return the gradients of one policy step on the sampled rows, half of which were good."""
    rows = [row for rows in subject.rows for row in rows]
    signs = torch.cat([torch.full((len(row.token_ids),), 1.0 - 2 * (i % 2)) for i, row in enumerate(rows)])
    subject.causal_lm.train()
    logprobs = subject.tree(packed=True)
    (-(signs.to(logprobs) * logprobs).mean()).backward()
    subject.causal_lm.eval()
    found = _Gradients()
    for weight in adapted_weights(subject.wrapped):
        for factor, into in ((weight.a, found.a), (weight.b, found.b)):
            gradient = torch.zeros_like(factor) if factor.grad is None else factor.grad
            into[weight.name] = float(gradient.abs().max()) if torch.isfinite(gradient).all() else float("nan")
        if len(weight.shape) == 3 and weight.b.grad is not None:
            by_expert = weight.b.grad.unflatten(1, (-1, weight.shape[0])).abs().amax(dim=(0, 1))
            found.experts += len(by_expert)
            found.experts_touched += int((by_expert > 0).sum())
        weight.a.grad = weight.b.grad = None
    return found


def _gradient(subject: Subject, fresh: _Gradients) -> Check:
    """Ask for a finite gradient that is not zero on every factor: on every B at once, on every A after one step."""
    later = _gradients(subject)
    dead = [f"{name} (B)" for name, size in fresh.b.items() if not size > 0]
    dead += [f"{name} (A)" for name, size in later.a.items() if not size > 0]
    dead += [f"{name} (B)" for name, size in later.b.items() if not size > 0 and f"{name} (B)" not in dead]
    moved = sum(size != 0 for size in fresh.a.values())  # B is zero at the start, so A cannot have one yet
    smallest = min((*later.a.values(), *later.b.values()), default=0.0)
    numbers = {"tensors": len(later.a) + len(later.b), "without": len(dead), "smallest": smallest, "a_at_start": moved}
    detail = f"{numbers['tensors']} factors, smallest of their largest numbers {smallest:.2g}"
    if later.experts:
        numbers |= {"experts": later.experts, "experts_touched": later.experts_touched}
        detail += f"; {later.experts_touched} of {later.experts} stacked expert weights saw a token"
    if dead:
        detail = f"no finite gradient but zero on {dead[0]} and {len(dead) - 1} more; {detail}"
    return Check("gradient", not dead and not moved, detail, numbers)


def _judge(subject: Subject, name: str, what: str, got: Tensor, expected: Tensor) -> Check:
    """Compare log probabilities under the bounds of the model's dtype."""
    found = compare(got, expected)
    numbers = {"tokens": found.tokens, "max": found.largest, "mean": found.mean, "p99": found.p99}
    return Check(name, found.holds(subject.loaded.dtype), f"{what}: {found.describe(subject.loaded.dtype)}", numbers)


def _sampled(subject: Subject) -> Tensor:
    values = [value for rows in subject.rows for row in rows for value in row.logprobs]
    return torch.tensor(values, dtype=torch.float64, device=subject.loaded.device)


def _passes(subject: Subject) -> Iterator[Check]:
    """Compare sampler, trainer and a padded batch with every sequence alone."""
    plain = subject.plain()
    yield _judge(subject, "sampler", "sampler and plain pass", _sampled(subject), plain)
    yield _judge(subject, "tree", "trainer, a prompt at a time, and plain pass", subject.tree(packed=False), plain)
    yield _judge(subject, "packed", "trainer, all prompts packed, and plain pass", subject.tree(packed=True), plain)
    yield _judge(subject, "padded", "left-padded batch and plain pass", subject.padded(), plain)


@contextmanager
def small_window(model: Any, window: int) -> Iterator[int]:
    """Narrow every sliding window of a model for the duration of the block; yields the number of such layers."""
    modules = [module for module in model.modules() if getattr(module, "sliding_window", None)]
    before = [(module, module.sliding_window) for module in modules]
    whole = getattr(model.config, "sliding_window", None)
    try:
        for module in modules:
            module.sliding_window = window
        if modules:
            model.config.sliding_window = window
        yield len(modules)
    finally:
        for module, width in before:
            module.sliding_window = width
        if modules:
            model.config.sliding_window = whole


def _sliding_window(subject: Subject) -> Check:
    """Compare sampler and trainer with the plain pass at a window that the prompts leave."""
    name = "sliding_window"
    before, rows = subject.plain(), subject.rows
    with small_window(subject.causal_lm, WINDOW) as layers:
        if not layers:
            return Check(name, True, "the model has none", {"layers": 0})
        moved = float((subject.plain() - before).abs().max())
        trained = _judge(subject, name, "trainer", subject.tree(packed=True), subject.plain())
        subject.rows = subject.sample()
        sampled = _judge(subject, name, "sampler", _sampled(subject), subject.plain())
    subject.rows = rows
    numbers = {"layers": layers, "trainer_max": trained.numbers["max"], "sampler_max": sampled.numbers["max"]}
    acts = moved > TOLERANCE  # or the comparison says nothing
    detail = f"{layers} layers, narrowed to {WINDOW} tokens (moves up to {moved:.2g} nats); {trained.detail}; "
    passed = trained.passed and sampled.passed and acts
    return Check(name, passed, detail + sampled.detail, numbers | {"moved": moved})


def _effect(subject: Subject) -> Check:
    """Switch every kind of adapter on alone: each must move the log probabilities."""
    groups = kinds(adapted_weights(subject.wrapped))
    kept = {weight.name: weight.b.clone() for own in groups.values() for weight in own}
    rows = subject.rows
    subject.rows = [own[:1] for own in rows]
    for own in groups.values():
        for weight in own:
            weight.b.zero_()
    base = subject.plain()
    effects: dict[str, float] = {}
    for kind, own in groups.items():
        for weight in own:
            weight.b.copy_(kept[weight.name])
        effects[kind] = float((subject.plain() - base).abs().max())
        for weight in own:
            weight.b.zero_()
    for own in groups.values():
        for weight in own:
            weight.b.copy_(kept[weight.name])
    subject.rows = rows
    silent = [kind for kind, size in effects.items() if not size > 0]
    weakest = min(effects, key=lambda kind: effects[kind])
    detail = f"alone, the adapters of {weakest} move least: {effects[weakest]:.2g} nats"
    if silent:
        detail = f"the adapters of {', '.join(silent)} change nothing"
    return Check("effect", not silent, detail, effects)


def _merged(subject: Subject) -> Check:
    """Fold the adapter into the weights, as the sampler does, and compare; then see that the weights are back."""
    if subject.loaded.dtype is torch.bfloat16:
        return Check("merged", True, "not merged in bfloat16: it would round the adapter away")
    if not subject.loaded.resident:
        return Check("merged", True, "not merged: the weights are in 4 bits, or not on the device")
    plain = subject.plain()
    with merged_adapter(subject.wrapped):
        inside = subject.plain()
    found = _judge(subject, "merged", "adapter in the weights and beside them", inside, plain)
    back = torch.equal(subject.plain(), plain)
    detail = found.detail + ("" if back else "; the weights did NOT come back")
    return Check("merged", found.passed and back, detail, found.numbers)


def _round_trip(subject: Subject) -> Check:
    """Save the adapter, load it with plain PEFT and with the harness; leaves the model without adapters."""
    with tempfile.TemporaryDirectory(prefix="harness-parity-") as temporary:
        first, other = Path(temporary) / "first", Path(temporary) / "other"
        expected = subject.plain()
        sha = save_adapter(subject.wrapped, first)
        weight = adapted_weights(subject.wrapped)[0]
        weight.b.mul_(1.5)
        told = save_adapter(subject.wrapped, other) != sha and not torch.equal(subject.plain(), expected)
        gaps = []
        for load in (lambda base: PeftModel.from_pretrained(base, str(first)), lambda base: load_adapter(base, first)):
            _unwrap(subject)
            subject.wrapped = load(subject.loaded.model)
            subject.wrapped.eval()
            gaps.append(float((subject.plain() - expected).abs().max()))
        _unwrap(subject)
    numbers = {"peft_max": gaps[0], "harness_max": gaps[1], "hash_follows_weights": int(told)}
    detail = f"difference after plain PEFT {gaps[0]:.2g}, after the harness {gaps[1]:.2g} nats (0 is asked for)"
    if not told:
        detail += "; a changed weight did NOT change hash and output"
    return Check("round_trip", max(gaps) == 0 and told, detail, numbers)


def _unwrap(subject: Subject) -> None:
    base: Any = subject.wrapped.unload()
    for module in base.modules():
        module.__dict__.pop("forward", None)  # the trainer's own way through a layer, which `prepare` put there
    if hasattr(base, "peft_config"):
        del base.peft_config  # PEFT would take what it attaches next for a second adapter
