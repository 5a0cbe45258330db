"""Episodes of four turns, sampled by the engine from a random model: the trainer sees what the sampler saw."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import TrainSection  # noqa: E402
from harness.core.types import FinishReason, Segment  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from harness.inference.lora import trainable  # noqa: E402
from harness.inference.tree import ATTENTION  # noqa: E402
from harness.rollouts.collect import Sampling, collect  # noqa: E402
from harness.training.batches import Group, micro_batch, split_groups  # noqa: E402
from harness.training.grouping import make_group  # noqa: E402
from harness.training.policy import StepStats, accumulate_gradient, tree_logprobs  # noqa: E402
from tests.calculator_env import Calculator  # noqa: E402
from tests.chat_support import EOT, IM_END, QWEN_LIKE, chat_tokenizer  # noqa: E402
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402
from tests.training.reference import naive_logprobs, relative_difference  # noqa: E402

TURNS, GROUP, TEMPERATURE = 4, 3, 0.8
TOKENIZER = chat_tokenizer(QWEN_LIKE)
# many ends of turn: a random model then ends most replies by itself
ENDS = frozenset({IM_END, EOT, *range(40, 60)})
CPU = torch.device("cpu")


def model(dtype):
    return with_adapter(tiny_llama(dtype, vocabulary=len(TOKENIZER)))


@functools.cache
def groups(dtype):
    """Return groups of episodes that the engine played with the calculator."""
    wrapped = model(dtype)
    engine = TransformersEngine(loaded(wrapped.get_base_model(), TOKENIZER, ENDS), wrapped)
    env = Calculator()
    seeds = [[1000 * t + i for i in range(GROUP)] for t in range(3)]
    sampling = Sampling(24, TEMPERATURE, 512, TURNS)
    rollouts = collect(engine, TOKENIZER, ENDS, env, env.tasks("train")[:3], GROUP, sampling, seeds)
    parts = [tuple(rollouts[i : i + GROUP]) for i in range(0, len(rollouts), GROUP)]
    return [Group(part, (0.75, -0.5, -0.25), TEMPERATURE) for part in parts]


def rollouts(dtype):
    return [rollout for group in groups(dtype) for rollout in group.rollouts]


def reported(rollout):
    return torch.tensor(rollout.completion.logprobs)


def alone(causal_lm, rollout):
    """Return the logprobs of what was sampled from a plain pass over the whole episode."""
    every = naive_logprobs(causal_lm, rollout.prompt_ids, rollout.token_ids, TEMPERATURE)
    return every[torch.tensor(rollout.sampled)]


def padded(causal_lm, episodes, left):
    """Return the logprobs of what was sampled from one padded batch."""
    causal_lm.set_attn_implementation("eager")
    rows = [[*r.prompt_ids, *r.token_ids] for r in episodes]
    width = max(map(len, rows))
    ids, real = torch.full((len(rows), width), IM_END), torch.zeros(len(rows), width, dtype=torch.long)
    for place, row in enumerate(rows):
        own = slice(width - len(row), width) if left else slice(0, len(row))
        ids[place, own], real[place, own] = torch.tensor(row), 1
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = causal_lm(input_ids=ids, attention_mask=real, position_ids=positions, use_cache=False).logits
    found = []
    for place, (rollout, row) in enumerate(zip(episodes, rows, strict=True)):
        logs = torch.log_softmax(logits[place][real[place].bool()].float() / TEMPERATURE, -1)
        targets = torch.tensor(row[1:])
        every = logs[:-1].gather(1, targets[:, None])[:, 0]
        found.append(every[len(rollout.prompt_ids) - 1 :][torch.tensor(rollout.sampled)])
    return found


def in_trees(causal_lm, parts):
    """Return the trainer's logprobs by rollout."""
    causal_lm.set_attn_implementation(ATTENTION)
    found = {}
    for part in parts:
        batch = micro_batch(part, CPU, torch.float32)
        with torch.no_grad():
            flat = tree_logprobs(causal_lm, batch.tree, batch.temperatures)[0]
        rows = [group.rollouts[i] for group in part for i in group.computed]
        found |= {
            (row.group, row.index): piece for row, piece in zip(rows, flat.split(list(batch.lengths)), strict=True)
        }
    return found


def test_the_episodes_are_worth_testing():
    played = rollouts(torch.float32)
    assert sum(rollout.turns == TURNS for rollout in played) >= 5
    assert {rollout.episode.finish_reason for rollout in played} >= {FinishReason.MAX_TURNS}
    assert len({rollout.token_ids for rollout in played}) == 9
    assert any(len(segment.token_ids) > 10 for rollout in played for segment in rollout.segments if segment.sampled)


@pytest.mark.parametrize("budget", [100_000, 600, 1])
def test_trainer_and_sampler_agree_over_four_turns_packed_or_not(budget):
    base, own = model(torch.float32).get_base_model(), groups(torch.float32)
    parts = split_groups(own, budget)
    assert len(parts) == {100_000: 1, 1: 9}.get(budget, len(parts)) and (budget != 600 or 1 < len(parts) < 9)
    found = in_trees(base, parts)
    gaps = [float((found[r.group, r.index] - reported(r)).abs().max()) for r in rollouts(torch.float32)]
    assert max(gaps) <= 1e-4


@pytest.mark.parametrize("left", [True, False])
def test_item_14_padding_changes_nothing_where_positions_are_given(left):
    """A left-padded batch without positions is wrong by nats (unsloth-zoo#840); the trainer pads nothing at all."""
    base, played = model(torch.float32).get_base_model(), rollouts(torch.float32)
    for rollout, found in zip(played, padded(base, played, left), strict=True):
        assert (found - reported(rollout)).abs().max() <= 1e-4
        assert (alone(base, rollout).detach() - reported(rollout)).abs().max() <= 1e-4
    own = groups(torch.float32)
    batch = micro_batch(own, CPU, torch.float32)
    shared = {g.prompt[:end] for g in own for end in range(1, len(g.prompt))}  # a prompt's last token is its own
    assert batch.tree.tokens == len(shared) + len(own) + sum(len(r.token_ids) for g in own for r in g.rollouts)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize("budget", [100_000, 600])
def test_the_gradient_is_that_of_one_episode_at_a_time(dtype, bound, budget):
    wrapped, own = model(dtype), groups(dtype)
    shared = gradient(wrapped, own, budget)
    assert relative_difference(shared, naive(wrapped, own)) < bound
    assert all(float(part.abs().max()) > 0 for part in shared.values())


def gradient(wrapped, own, budget, **settings):
    parameters = trainable(wrapped)
    for parameter in parameters.values():
        parameter.grad = None
    section = TrainSection(entropy_beta=0.0, microbatch_tokens=budget, **settings)
    accumulate_gradient(wrapped.get_base_model(), own, section, StepStats())
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


def naive(wrapped, own, everything=False):
    """Return the gradient of -sum(advantage * logprob) / sampled tokens, one episode at a time."""
    parameters = trainable(wrapped)
    for parameter in parameters.values():
        parameter.grad = None
    active = sum(group.completion_tokens for group in own)
    for group in own:
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
            logprobs = naive_logprobs(wrapped.get_base_model(), group.prompt, rollout.token_ids, TEMPERATURE)
            counted = logprobs if everything else logprobs[torch.tensor(rollout.sampled)]
            (-(advantage * counted).sum() / active).backward()
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


def test_training_on_the_environments_text_would_be_noticed():
    """Guards the test above."""
    wrapped, own = model(torch.float64), groups(torch.float64)
    assert relative_difference(gradient(wrapped, own, 100_000), naive(wrapped, own, everything=True)) > 0.1


def test_only_what_the_model_wrote_is_trained():
    own = groups(torch.float32)
    batch = micro_batch(own, CPU, torch.float32)
    played = rollouts(torch.float32)
    written = [token for rollout in played for token in rollout.completion.token_ids]
    assert batch.tree.target_ids().tolist() == written
    assert batch.lengths == tuple(len(rollout.completion.token_ids) for rollout in played)
    assert torch.equal(batch.sampler_logprobs, torch.cat([reported(rollout) for rollout in played]))
    assert len(batch.advantages) == len(batch.temperatures) == len(written)
    assert sum(group.completion_tokens for group in own) == len(written)


def test_item_11_the_end_of_a_turn_is_trained_and_the_template_s_is_not():
    """Masks go by position: an id that also pads or ends is trained where the model wrote it (TRL#6357)."""
    own = groups(torch.float32)
    batch = micro_batch(own, CPU, torch.float32)
    places = {int(place) + 1 for place in batch.tree.prediction_index()}
    targets = batch.tree.target_ids().tolist()
    for rollout in rollouts(torch.float32):
        for segment in rollout.segments:
            if segment.sampled and segment.token_ids[-1] in ENDS:
                assert segment.token_ids[-1] in targets
    ended = sum(s.token_ids[-1] in ENDS for r in rollouts(torch.float32) for s in r.segments if s.sampled)
    assert sum(token in ENDS for token in targets) == ended > 20
    ids = batch.tree.input_ids[0].tolist()
    untrained = [place for place, token in enumerate(ids) if token == IM_END and place not in places]
    assert untrained  # those of the prompt and of the environment's messages


def test_item_15_the_first_token_of_a_reply_is_predicted_from_its_own_episode():
    """Nothing is predicted across episodes that lie side by side (TRL#5854)."""
    own = groups(torch.float32)
    batch = micro_batch(own, CPU, torch.float32)
    sources = batch.tree.prediction_index().tolist()
    firsts = iter(sources[sum(batch.lengths[:i])] for i in range(len(batch.lengths)))
    for group, branch in zip(own, batch.tree.branches, strict=True):
        end_of_prompt = branch.start + branch.suffix - 1
        assert [next(firsts) for _ in group.rollouts] == [end_of_prompt] * GROUP
        assert batch.tree.input_ids[0, end_of_prompt] == group.prompt[-1]
    positions = batch.tree.position_ids[0].tolist()
    ids, targets = batch.tree.input_ids[0].tolist(), batch.tree.target_ids().tolist()
    place = 0
    for rollout in rollouts(torch.float32):
        whole = [*rollout.prompt_ids, *rollout.token_ids]
        for offset in [i for i, sampled in enumerate(rollout.sampled) if sampled]:
            at = len(rollout.prompt_ids) + offset
            assert (ids[sources[place]], targets[place]) == (whole[at - 1], whole[at])
            assert positions[sources[place]] == at - 1
            place += 1


def test_item_05_an_episode_counts_once_however_many_turns_it_had():
    """One reward per rollout, one advantage for all its turns; episodes are never forked or compacted (miles#1325)."""
    played = rollouts(torch.float32)[:GROUP]
    rewards = [1.0, 0.5, 0.0]
    scored = [
        type(rollout)(
            rollout.task, rollout.group, rollout.index, rollout.prompt_ids, rollout.segments[: 1 + 2 * place],
            rollout.episode, type(rollout.score)(reward, {}),
        )
        for place, (rollout, reward) in enumerate(zip(played, rewards, strict=True))
    ]  # fmt: skip
    group = make_group(scored, "mean", False, 1.0)
    assert len({rollout.turns for rollout in scored}) > 1
    assert group.advantages == pytest.approx((0.5, 0.0, -0.5))
    batch = micro_batch([group], CPU, torch.float32)
    pieces = batch.advantages.split(list(batch.lengths))
    assert [piece.unique().tolist() for piece in pieces] == [[0.5], [0.0], [-0.5]]


def test_sampling_later_turns_is_sampling_from_the_whole_episode():
    """A later reply has the logprobs of the full conversation as its prompt, whatever it is batched with."""
    wrapped = model(torch.float64)
    engine = TransformersEngine(loaded(wrapped.get_base_model(), TOKENIZER, ENDS), wrapped)
    env = Calculator()
    (one,) = collect(
        engine, TOKENIZER, ENDS, env, env.tasks("train")[1:2], 1, Sampling(24, TEMPERATURE, 512, TURNS), [[1001]]
    )
    same = next(r for r in rollouts(torch.float64) if (r.group, r.index) == ("train-01", 1))
    assert [s.token_ids for s in one.segments] == [s.token_ids for s in same.segments]
    assert isinstance(one.segments[1], Segment) and not one.segments[1].sampled


@pytest.mark.slow
def test_embedded_model_four_turns():
    """The same on the embedded model with its own template, in float32."""
    from harness.config.schema import ModelSection
    from harness.core.errors import HarnessError
    from harness.inference.models import load_model

    try:
        own = load_model(ModelSection(dtype="float32", device="cpu"))
    except HarnessError as error:
        pytest.skip(f"the embedded model is not here: {error}")
    wrapped = with_adapter(own.model, rank=16, scale=0.01)
    engine, env = TransformersEngine(own, wrapped), Calculator()
    sampling, seeds = Sampling(48, TEMPERATURE, 1024, TURNS), [[1, 2, 3], [4, 5, 6]]
    played = collect(engine, own.tokenizer, own.eos_ids, env, env.tasks("train")[:2], 3, sampling, seeds)
    parts = [Group(tuple(played[i : i + 3]), (0.5, -0.25, -0.25), TEMPERATURE) for i in (0, 3)]
    base = wrapped.get_base_model()
    gaps: dict[int | str, float] = {}
    for budget in (100_000, 1):
        found = in_trees(base, split_groups(parts, budget))
        gaps[budget] = max(float((found[r.group, r.index] - reported(r)).abs().max()) for r in played)
    gaps["alone"] = max(float((alone(base, r).detach() - reported(r)).abs().max()) for r in played)
    print(f"turns {[r.turns for r in played]}, largest gap in nats: {gaps}")
    assert max(r.turns for r in played) >= 3
    assert max(gaps.values()) <= 1e-4
