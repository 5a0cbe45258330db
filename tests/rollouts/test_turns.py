"""Episodes of several turns: one sequence of ids, who wrote what, how they end, and what the engine is asked."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from harness.core.errors import ConfigError
from harness.core.seeds import derive_seed
from harness.core.types import Completion, FailureClass, FinishReason, Message
from harness.inference.chat import render_chat
from harness.rollouts.collect import Sampling, Timing, collect
from harness.rollouts.store import read_rollouts, write_rollouts
from harness.training.grouping import make_group
from tests.calculator_env import Calculator, CalculatorArgs, compute
from tests.chat_support import EOT, IM_END, QWEN_LIKE, THOUGHTLESS, chat_tokenizer

TOKENIZER = chat_tokenizer(QWEN_LIKE)
ENDS = frozenset({IM_END, EOT})
OPENING = len(render_chat(TOKENIZER, Calculator().start(Calculator().tasks("train")[0]).messages))


class Scripted:
    """An engine that answers call by call, spelling every letter; a reply without a bar at its end was cut."""

    def __init__(self, *calls):
        self.calls, self.asked = list(calls), []

    def generate(self, prompts, n, max_tokens, temperature, seeds):
        self.asked.append((prompts, n, max_tokens, temperature, seeds))
        replies = iter(self.calls[len(self.asked) - 1])
        return [[spelled(next(replies)) for _ in range(n)] for _ in prompts]


def spelled(text):
    ends = {"|": [IM_END], "!": [EOT]}.get(text[-1:], [])
    ids = (*TOKENIZER.convert_tokens_to_ids([*(text[:-1] if ends else text)]), *ends)
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    return Completion(ids, tuple(-0.125 * (1 + place) for place in range(len(ids))), reason)


def play(engine, turns=4, count=1, n=1, context=900, env=None, timing=None, tokenizer=TOKENIZER):
    env = env or Calculator()
    tasks = env.tasks("train")[:count]
    seeds = [[10 * t + i for i in range(n)] for t in range(count)]
    sampling = Sampling(40, 0.7, context, turns)
    return collect(engine, tokenizer, ENDS, env, tasks, n, sampling, seeds, timing=timing)


def text(segment):
    return TOKENIZER.decode(segment.token_ids)


def test_an_episode_is_prompt_replies_and_what_stands_between():
    engine, timing = Scripted(["calc: 11*3+0|"], ["answer: 33|"]), Timing()
    (rollout,) = play(engine, timing=timing)
    assert [segment.sampled for segment in rollout.segments] == [True, False, True]
    assert [text(segment) for segment in rollout.segments] == [
        "calc: 11*3+0<|im_end|>",
        "\n<|im_start|>user\n= 33<|im_end|>\n<|im_start|>assistant\n",
        "answer: 33<|im_end|>",
    ]
    assert rollout.episode.messages[2:] == (
        Message("assistant", "calc: 11*3+0"),
        Message("user", "= 33"),
        Message("assistant", "answer: 33"),
    )
    assert rollout.score.components == {"right": 1.0, "format": 1.0}
    assert (rollout.episode.finish_reason, rollout.turns) == (FinishReason.STOP, 2)
    written = rollout.completion
    assert timing.tokens == len(written.token_ids) == len(written.logprobs) == sum(rollout.sampled) == 13 + 11
    assert len(rollout.token_ids) == len(rollout.sampled) > 24
    # ids as sampled, letter by letter, though the tokenizer would merge "calc"
    assert rollout.token_ids[:4] == tuple(TOKENIZER.convert_tokens_to_ids([*"calc"]))
    assert TOKENIZER("calc", add_special_tokens=False)["input_ids"] != list(rollout.token_ids[:4])


def test_all_live_episodes_sample_their_next_turn_in_one_call():
    engine = Scripted(
        ["calc: 1+1|", "answer: 33|", "calc: 2+2|", "cut off"],
        ["answer: 1|", "calc: 5*5|"],
        ["answer: 47|"],
    )
    rollouts = play(engine, count=2, n=2)
    assert [(r.group, r.index, r.turns, r.episode.finish_reason) for r in rollouts] == [
        ("train-00", 0, 2, FinishReason.STOP),
        ("train-00", 1, 1, FinishReason.STOP),
        ("train-01", 0, 3, FinishReason.STOP),
        ("train-01", 1, 1, FinishReason.LENGTH),
    ]
    first, second, third = engine.asked
    assert [len(prompts) for prompts, *_ in engine.asked] == [2, 2, 1]
    assert (first[1], first[4]) == (2, [[0, 1], [10, 11]])  # the first turn is asked as an episode of one turn is
    assert (second[1], third[1]) == (1, 1)
    assert second[4] == [[derive_seed(0, "turn", 2)], [derive_seed(10, "turn", 2)]]
    assert third[4] == [[derive_seed(10, "turn", 3)]]
    for rollout, asked in ((rollouts[0], second[0][0]), (rollouts[2], third[0][0])):
        before = rollout.segments[:-1]
        assert asked == (*rollout.prompt_ids, *(token for segment in before for token in segment.token_ids))


def test_the_conversation_equals_a_full_render_of_its_text():
    (rollout,) = play(Scripted(["calc: 4*4|"], ["hm|"], ["answer: 16|"]))
    shown = TOKENIZER.decode([*rollout.prompt_ids, *rollout.token_ids])
    assert TOKENIZER.decode(render_chat(TOKENIZER, rollout.episode.messages)).startswith(shown)


@pytest.mark.parametrize(
    ("calls", "settings", "finish", "turns"),
    [
        ([["answer: 33|"]], {}, FinishReason.STOP, 1),
        ([["calc: 1|"], ["calc: 2+"]], {}, FinishReason.LENGTH, 2),
        ([["calc: 1|"], ["calc: 2|"]], {"turns": 2}, FinishReason.MAX_TURNS, 2),
        ([["calc: 1|"]], {"turns": 1}, FinishReason.MAX_TURNS, 1),
        ([["calc: 1|"]], {"context": OPENING + 45}, FinishReason.CONTEXT, 1),
    ],
)
def test_how_episodes_end(calls, settings, finish, turns):
    (rollout,) = play(Scripted(*calls), **settings)
    assert (rollout.episode.finish_reason, rollout.completion.finish_reason, rollout.turns) == (finish, finish, turns)
    assert rollout.segments[-1].sampled  # nothing follows the last reply, so no token is computed in vain
    assert rollout.episode.messages[-1].role == "assistant"


def test_a_turn_begins_only_where_a_whole_reply_fits():
    whole = play(Scripted(["calc: 1|"], ["answer: 1|"]))[0]
    needed = len(whole.prompt_ids) + sum(len(s.token_ids) for s in whole.segments[:2]) + 40
    assert play(Scripted(["calc: 1|"], ["answer: 1|"]), context=needed)[0].turns == 2
    (short,) = play(Scripted(["calc: 1|"]), context=needed - 1)
    assert (short.turns, short.episode.finish_reason) == (1, FinishReason.CONTEXT)


def test_truncated_episodes_are_masked_by_tokens_not_by_turns():
    rollouts = play(Scripted(["answer: 33|", "calc: 1|", "cut"], ["calc: 2|"]), n=3, turns=2)
    group = make_group(rollouts, "mean", True, 0.7)
    assert group.outside == frozenset({2})
    (short,) = play(Scripted(["calc: 1|"]), context=OPENING + 45)
    assert make_group([short, rollouts[0]], "mean", True, 0.7).outside == frozenset({0})


def test_any_end_of_turn_closes_a_reply_once():
    """The model may end a turn with another of its end ids than the template writes: it is not ended twice."""
    (rollout,) = play(Scripted(["calc: 1+1!"], ["answer: 2|"]))
    assert [text(segment) for segment in rollout.segments[:2]] == [
        "calc: 1+1<|eot|>",
        "\n<|im_start|>user\n= 2<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert rollout.episode.messages[2].content == "calc: 1+1"


def test_a_tool_that_fails_is_no_fault_of_the_model():
    rollouts = play(Scripted(["calc: 1|", "answer: 33|"]), n=2, env=Calculator(CalculatorArgs(broken=True)))
    assert [r.score.failure for r in rollouts] == [FailureClass.TOOL, None]
    assert rollouts[0].score.diagnostics["error"] == "ToolError: the calculator does not answer"
    assert make_group(rollouts, "mean", False, 0.7).outside == frozenset({0})


def test_a_template_that_rewrites_history_is_refused_at_the_second_turn():
    tokenizer = chat_tokenizer(THOUGHTLESS)
    assert play(Scripted(["answer: 33|"]), tokenizer=tokenizer)[0].score.components["right"] == 1.0
    with pytest.raises(ConfigError, match="would not stay what was sampled"):
        play(Scripted(["calc: 1|"], ["answer: 1|"]), tokenizer=tokenizer)


def test_stored_rollouts_say_how_many_turns_they_had(tmp_path):
    rollouts = play(Scripted(["calc: 11*3|", "answer: 33|"], ["answer: 33|"]), n=2)
    write_rollouts(tmp_path / "calculator.jsonl", rollouts, [0.0, 0.0])
    two, one = read_rollouts(tmp_path / "calculator.jsonl")
    assert two["turns"] == 2 and "turns" not in one
    assert two["prompt"].endswith("[assistant]\ncalc: 11*3\n\n[user]\n= 33")
    assert (two["completion"], two["finish"], two["tokens"]) == ("answer: 33", "stop", 11 + 11)


def test_the_calculator_computes_and_refuses():
    assert compute(" 2*3+4 ") == 10
    for bad in ("", "2**9", "__import__('os')", "2+", "1/0", "(" * 300):
        with pytest.raises(ValueError, match="not a sum or product"):
            compute(bad)
