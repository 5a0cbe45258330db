"""Playing tasks: what the engine is asked, what a rollout holds, and whose failure is whose."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from harness.core.errors import ConfigError, InfraError
from harness.core.types import Completion, FailureClass, FinishReason, Message, Score
from harness.inference.chat import decode, render_chat
from harness.rollouts.collect import Sampling, Timing, collect
from harness.rollouts.store import read_rollouts, write_rollouts
from tests.toy_env import Toy, ToyArgs

END = 3


class Letters:
    """A tokenizer whose ids are code points."""

    chat_template: str | None = "yes"

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in chat) + "<assistant>"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return "".join("<end>" if i == END else chr(i) for i in ids)


class Scripted:
    """An engine that answers from a list, and remembers what it was asked."""

    def __init__(self, *replies):
        self.replies, self.calls = replies, []

    def generate(self, prompts, n, max_tokens, temperature, seeds):
        self.calls.append((prompts, n, max_tokens, temperature, seeds))
        source = iter(self.replies)
        return [[completion(next(source)) for _ in range(n)] for _ in prompts]


def completion(text):
    """A reply without a dot at its end was cut."""
    ids = [ord(letter) for letter in text.rstrip(".")] + ([END] if text.endswith(".") else [])
    reason = FinishReason.STOP if text.endswith(".") else FinishReason.LENGTH
    return Completion(tuple(ids), tuple(-0.5 for _ in ids), reason)


def play(engine, env=None, n=2, context=500, components=None, timing=None, count=2):
    env = env or Toy(ToyArgs())
    tasks = env.tasks("train")[:count]
    seeds = [[10 * t + i for i in range(n)] for t in range(len(tasks))]
    sampling = Sampling(20, 0.7, context)
    return collect(engine, Letters(), frozenset({END}), env, tasks, n, sampling, seeds, components, timing)


def test_rollouts_come_task_by_task_with_their_tokens():
    engine, timing = Scripted("abc.", "xyz.", "ax.", "cut off"), Timing()
    rollouts = play(engine, timing=timing)
    assert [(r.group, r.index) for r in rollouts] == [
        ("train-00", 0),
        ("train-00", 1),
        ("train-01", 0),
        ("train-01", 1),
    ]
    assert [r.score.reward for r in rollouts] == [1.0, 0.0, 0.5, 3 / 7]
    assert [r.episode.final for r in rollouts] == ["abc", "xyz", "ax", "cut off"]
    assert rollouts[0].completion.token_ids == (97, 98, 99, END)  # the end stays in what is trained on
    assert timing.tokens == 4 + 4 + 3 + 7
    ((prompts, n, max_tokens, temperature, seeds),) = engine.calls
    assert (n, max_tokens, temperature, seeds) == (2, 20, 0.7, [[0, 1], [10, 11]])
    text = "".join(map(chr, prompts[0]))
    assert text == "<system>Write something.<user>word train-00<assistant>"
    assert rollouts[0].prompt_ids == tuple(prompts[0])


def test_a_searched_prompt_replaces_the_shipped_text():
    engine = Scripted("a.", "b.")
    (first, _) = play(engine, components={"system": "Be brief."}, count=1)
    assert first.episode.messages[0] == Message("system", "Be brief.")
    with pytest.raises(ConfigError, match="unknown prompt component"):
        play(engine, components={"sytem": "x"}, count=1)


def test_a_cut_reply_is_told_to_the_verifier_and_the_trainer():
    whole, cut = play(Scripted("abc.", "abc"), count=1)
    assert (whole.episode.finish_reason, cut.episode.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert (whole.completion.finish_reason, cut.completion.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert whole.episode.final == cut.episode.final == "abc"


def test_a_verifier_that_raises_is_no_zero():
    rollouts = play(Scripted(*["a."] * 4), env=Toy(ToyArgs(reward="raises")))
    assert {r.score.failure for r in rollouts} == {FailureClass.VERIFIER}
    assert not any(r.score.counts for r in rollouts)
    assert rollouts[0].score.diagnostics == {"error": "RuntimeError: the verifier has a bug"}


def test_one_raising_score_stays_outside_the_baseline():
    from harness.training.grouping import make_group

    class Moody(Toy):
        def score(self, task, episode):
            if episode.final == "boom":
                raise ZeroDivisionError("x" * 1000)
            return super().score(task, episode)

    rollouts = play(Scripted("abc.", "boom.", "xyz."), env=Moody(ToyArgs()), n=3, count=1)
    group = make_group(rollouts, "mean", False, 0.7)
    assert group.advantages == (0.5, 0.0, -0.5)
    assert len(rollouts[1].score.diagnostics["error"]) == 500


def test_ctrl_c_in_a_verifier_is_not_a_verifier_failure():
    class Stopped(Toy):
        def score(self, task, episode):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(Scripted("a.", "b."), env=Stopped(ToyArgs()), count=1)


def test_a_prompt_without_room_for_the_reply_is_refused_before_sampling():
    engine = Scripted("a.", "b.")
    length = len("<system>Write something.<user>word train-00<assistant>")
    with pytest.raises(ConfigError, match=f"{length} prompt tokens and 20 for the reply") as caught:
        play(engine, context=length + 19, count=1)
    assert "CONTEXT.md" in caught.value.hint
    assert engine.calls == []
    assert len(play(engine, context=length + 20, count=1)) == 2


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = Letters()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        render_chat(tokenizer, [Message("user", "hi")])


def test_only_the_closing_end_is_left_out_of_the_text():
    assert decode(Letters(), [97, END], frozenset({END})) == "a"
    assert decode(Letters(), [97, END, END], frozenset({END})) == "a<end>"
    assert decode(Letters(), [], frozenset({END})) == ""
    assert decode(Letters(), [97], frozenset({END})) == "a"


def test_stored_rollouts_come_back(tmp_path):
    rollouts = play(Scripted("abc.", "\u202e\n\t\u2028é.", "ax.", "cut"))
    path = tmp_path / "deep" / "toy.jsonl"
    write_rollouts(path, rollouts, [0.5, -0.5, 0.0, 0.0])
    records = list(read_rollouts(path))
    assert [r["advantage"] for r in records] == [0.5, -0.5, 0.0, 0.0]
    assert [r["completion"] for r in records] == [r.episode.final for r in rollouts]
    assert records[0] | {"prompt": ""} == {
        "task": "train-00",
        "group": "train-00",
        "index": 0,
        "prompt": "",
        "completion": "abc",
        "finish": "stop",
        "reward": 1.0,
        "components": {"early": 1.0},
        "metrics": {},
        "diagnostics": {},
        "failure": None,
        "advantage": 0.5,
        "tokens": 4,
    }
    assert records[0]["prompt"] == "[system]\nWrite something.\n\n[user]\nword train-00"
    assert records[3]["finish"] == "length"
    write_rollouts(path, rollouts[:1], [0.0])
    assert len(list(read_rollouts(path))) == 1


def test_non_finite_numbers_are_stored_typed(tmp_path):
    class Odd(Toy):
        def score(self, task, episode):
            return Score(0.0, {}, {"surprise": float("inf")})

    rollouts = play(Scripted("a.", "b."), env=Odd(ToyArgs()), count=1)
    write_rollouts(tmp_path / "x.jsonl", rollouts, [0.0, 0.0])
    line = (tmp_path / "x.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["metrics"] == {"surprise": {"$non_finite": "inf"}}


def test_a_damaged_line_is_located(tmp_path):
    path = tmp_path / "x.jsonl"
    write_rollouts(path, play(Scripted("a.", "b."), count=1), [0.0, 0.0])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InfraError, match=r"x\.jsonl:2: "):
        list(read_rollouts(path))


@pytest.mark.parametrize("line", ["[]", "null", "1"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "toy.jsonl"
    path.write_text(f"{{}}\n{line}\n")
    with pytest.raises(InfraError, match=r"toy\.jsonl:2: not a JSON object"):
        list(read_rollouts(path))
