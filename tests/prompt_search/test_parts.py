"""Splits, guard, overlap, prompt files and the pieces of DrugProt: pure, and without an engine."""

from __future__ import annotations

import json

import pytest

from harness.core.errors import ConfigError, InfraError, RefusedError
from harness.core.types import Episode, FailureClass, FinishReason, Message
from harness.envs.base import Searchable, feedback_of, without_shown
from harness.envs.registry import load_environment
from harness.evaluation.records import ItemRecord
from harness.program import Program
from harness.program.prompts import PromptFile, read_prompt_file, write_prompt
from harness.prompt_search.cache import Cache, Evaluation
from harness.prompt_search.overlap import TrainingText
from harness.prompt_search.splits import Guard, Parts, sample_tasks, split_tasks
from tests.toy_env import toy_task

DRUGPROT = load_environment("drugprot")
TRAIN = DRUGPROT.tasks("train")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_parts_share_no_cluster_and_hold_every_training_task(seed):
    parts = split_tasks(TRAIN, seed)
    clusters = [{task.cluster for task in getattr(parts, name)} for name in Parts.__slots__]
    assert sum(map(len, clusters)) == len(set().union(*clusters)) == len({task.cluster for task in TRAIN})
    assert sum(len(getattr(parts, name)) for name in Parts.__slots__) == len(TRAIN)
    assert parts.scoring == split_tasks(TRAIN, seed + 10).scoring
    assert parts.validation != split_tasks(TRAIN, seed + 10).validation
    labels = {task.label for task in TRAIN}
    assert all({task.label for task in getattr(parts, name)} == labels for name in Parts.__slots__)


def test_too_few_clusters_are_an_error():
    with pytest.raises(ConfigError, match="too few"):
        split_tasks([toy_task(index, "train") for index in range(4)], 0)


def test_a_sample_takes_labels_in_turn_and_other_clusters_first():
    chosen = sample_tasks(split_tasks(TRAIN, 0).scoring, 50, 0)
    assert len({task.id for task in chosen}) == 50
    assert all(sum(task.label == label for task in chosen) == 5 for label in {task.label for task in TRAIN})
    assert len({task.cluster for task in chosen}) == 50


def test_the_guard_refuses_held_out_tasks_their_clusters_and_strangers():
    held = DRUGPROT.tasks("heldout")
    guard = Guard(TRAIN, held)
    guard.check(TRAIN)
    sibling = type(held[0])(**{n: getattr(TRAIN[0], n) for n in TRAIN[0].__slots__} | {"cluster": held[0].cluster})
    for task in (held[0], sibling, toy_task(1, "train")):
        with pytest.raises(RefusedError, match=task.id):
            guard.check([TRAIN[1], task])


def test_text_of_tasks_is_found_in_instructions_and_the_shipped_texts_are_not():
    text = TrainingText(TRAIN, DRUGPROT.components())
    body = TRAIN[3].fields["abstract"]
    copied = text.copied(f"Remember: {body.upper()} So answer.")
    assert copied is not None and len(copied[0].split()) == 8
    assert text.copied(" ".join(body.split()[:7])) is None
    for shipped in DRUGPROT.components().values():
        assert text.copied(shipped) is None
    for variants in DRUGPROT.instruction_variants().values():
        assert all(text.copied(variant) is None for variant in variants)


def test_tasks_of_a_shown_cluster_are_left_out():
    left = without_shown(TRAIN, {TRAIN[0].id})
    assert {task.cluster for task in TRAIN} - {task.cluster for task in left} == {TRAIN[0].cluster}
    assert without_shown(TRAIN, ()) == TRAIN


@pytest.mark.parametrize("style", DRUGPROT.demonstration_styles())
def test_drugprot_shows_tasks_as_examples_in_every_style(style):
    assert isinstance(DRUGPROT, Searchable)
    shown = TRAIN[:10]
    session = DRUGPROT.start(TRAIN[40], DRUGPROT.demonstrations(shown, style))
    replies = [message.content for message in session.messages if message.role == "assistant"]
    assert [reply[-2] for reply in replies] == [task.answer for task in shown]
    assert all(task.label in reply for task, reply in zip(shown, replies, strict=True))
    with pytest.raises(ConfigError, match="no style"):
        DRUGPROT.demonstrations(shown, "loud")


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("<think>x</think>\\boxed{%s}", "Right"),
        ("<think>x</think>\\boxed{Q}", "without a letter"),
        ("<think>", "No valid answer"),
        ("<think>a LABEL it is</think>\\boxed{M}", "then the letter of another option"),
        ("<think>PART-OF</think>\\boxed{M}", "the reply says M (PART-OF)"),
    ],
)
def test_feedback_names_what_was_wrong(reply, says):
    task = next(task for task in TRAIN if task.label == "INHIBITOR")
    text = reply.replace("%s", task.answer).replace("LABEL", task.label)
    episode = Episode(task.id, (Message("user", "?"), Message("assistant", text)), FinishReason.STOP)
    assert says in feedback_of(DRUGPROT, task, episode, DRUGPROT.score(task, episode))


TEXTS = {
    "plain": "one line",
    "lines": "a\nb \\boxed{x} ",
    "quotes": "it's '''three''' \n and \"two\"",
    "ends": "first\nlast'",
    "blank": "\n\nlead\n\n",
    "odd": "\x07 bell\nand\ttab\r\nreturn",
    "foreign": "é\u00a0\u202e\n”",
}


def test_a_prompt_file_keeps_every_character_and_is_not_overwritten(tmp_path):
    program = Program(tmp_path)
    scores = {
        "validation": {"reward": {"mean": 0.5, "low": 0.25, "high": 0.75}},
        "models": ["m"],
        "spent": {"tokens": 7},
    }
    file = PromptFile(source="run-007", demonstrations=("t-1", "t-2"), search=scores, components=TEXTS)
    name = write_prompt(program, "drugprot", "found-1", file)
    assert name == "rl/prompts/drugprot/found-1.toml" and read_prompt_file(program, "drugprot", "found-1") == file
    before = (tmp_path / name).stat().st_mtime_ns
    assert write_prompt(program, "drugprot", "found-1", file) == name
    assert (tmp_path / name).stat().st_mtime_ns == before
    with pytest.raises(RefusedError, match="other texts"):
        write_prompt(program, "drugprot", "found-1", file.model_copy(update={"components": {"system": "x"}}))


def item(task, failure=None):
    return Evaluation(ItemRecord(task, "c", 0, 0.5, {"accuracy": 1.0}, {}, failure), "fine", 7, 0.5)


def test_the_cache_keeps_what_was_stored_and_names_a_damaged_line(tmp_path):
    cache = Cache(tmp_path / "evaluations.jsonl")
    cache.add_evaluations([("k1", item("t1")), ("k2", item("t2"))])
    with pytest.raises(ValueError, match="not an evaluation"):
        cache.add_evaluations([("k3", item("t3", FailureClass.INFRA))])
    again = Cache(cache.path)
    assert again.evaluations == cache.evaluations and set(again.evaluations) == {"k1", "k2"}
    whole = cache.path.read_bytes()
    for cut in range(len(whole) - 1, len(whole) - 40, -7):
        cache.path.write_bytes(whole[:cut])
        assert set(Cache(cache.path).evaluations) == {"k1"}
        assert cache.path.read_bytes().endswith(b"\n")
    rows = [json.loads(line) for line in whole.splitlines()]
    rows[0]["item"]["failure"] = "infra"
    cache.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InfraError, match="line 1"):
        Cache(cache.path)
