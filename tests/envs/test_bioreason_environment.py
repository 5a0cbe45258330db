"""bioreason-go as its users see it: registry, arguments, splits, prompt, demonstrations, right answers."""

from dataclasses import replace

import pytest

from harness.core.errors import ConfigError, NotFoundError
from harness.core.types import Episode, FinishReason, Message
from harness.envs.bioreason_go.answer import read_answer
from harness.envs.bioreason_go.prompt import parse_demonstrations, render, shipped_components
from harness.envs.bioreason_go.records import task_candidates, task_labels
from harness.envs.registry import check_disjoint, load_environment, tasks_sha


@pytest.fixture(scope="module")
def env():
    return load_environment("bioreason-go")


def reply(task, text):
    return Episode(task.id, (Message("assistant", text),), FinishReason.STOP)


def test_splits_are_disjoint_and_of_documented_size(env):
    check_disjoint(env)
    assert (len(env.tasks("train")), len(env.tasks("heldout"))) == (3083, 358)
    assert len({task.id for split in ("train", "heldout") for task in env.tasks(split)}) == 3083 + 358
    with pytest.raises(NotFoundError) as caught:
        env.tasks("held-out")
    assert "heldout" in caught.value.hint


def test_weights_are_arguments_and_move_the_verifier_version(env):
    other = load_environment("bioreason-go", {"weights": {"similarity": 1.0, "valid": 0.0}})
    assert other.verifier_version != env.verifier_version
    assert other.version == env.version
    assert tasks_sha(other, "heldout") == tasks_sha(env, "heldout")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ({"sorce": "shipped"}, "source"),
        ({"weights": {"similarity": -1}}, "env show"),
        ({"path": "x"}, "records"),
        ({"source": "records", "heldout": 0}, "env show"),
    ],
)
def test_bad_arguments(args, hint):
    with pytest.raises(ConfigError) as caught:
        load_environment("bioreason-go", args)
    assert hint in caught.value.hint


def test_prompts_share_everything_but_the_question_and_are_short(env):
    tasks = env.tasks("heldout")
    prefixes = {env.start(task).messages[:-1] for task in tasks}
    assert len(prefixes) == 1
    prefix = next(iter(prefixes))
    assert [message.role for message in prefix] == ["system", "user", "assistant", "user", "assistant"]
    assert sum(len(message.content) for message in prefix) < 1_200  # 383 tokens of the embedded model
    question = env.start(tasks[0]).messages[-1].content
    for aspect, ids in task_candidates(tasks[0]).items():
        line = next(line for line in question.split("\n") if line.startswith(f"{aspect}: "))
        assert [part.split(" ")[0] for part in line.removeprefix(f"{aspect}: ").split("; ")] == ids
    assert "none" not in question
    assert env.start(tasks[0]).step("anything") is None


def test_e3_17_the_prompt_does_not_depend_on_the_gold(env):
    task = env.tasks("heldout")[0]
    other = replace(task, answer='{"mf":[],"bp":[],"cc":[]}', label="", cluster="x")
    assert env.start(task).messages == env.start(other).messages


def test_shipped_demonstrations_are_right_of_their_candidates(env):
    for record in parse_demonstrations(shipped_components()["demonstrations"]):
        for aspect, ids in read_answer(record["answer"]).lists.items():
            assert ids
            for entry in record[aspect].split("; "):  # ids and names as the ontology has them
                go_id, _, name = entry.partition(" ")
                index = env.ontology.index_of(go_id)
                assert (env.ontology.name(index), env.ontology.aspect(index)) == (name, aspect)
            assert set(ids) < {entry.partition(" ")[0] for entry in record[aspect].split("; ")}


def test_demonstrations_of_tasks_are_right_and_the_labels_score_full(env):
    for task in env.tasks("heldout")[:60]:
        assert env.score(task, reply(task, env.demonstration(task))).failure is None
        labels = task_labels(task)
        whole = reply(task, '{"summary":"x",' + ",".join(f'"{a}":{ids}' for a, ids in labels.items()) + "}")
        whole = reply(task, whole.final.replace("'", '"'))
        assert env.score(task, whole).components["similarity"] == pytest.approx(1.0)
        assert env.score(task, whole).reward == pytest.approx(1.0)
    empty = reply(task, "")
    assert env.score(task, empty).reward == 0.0
    assert "no valid object" in env.feedback(task, empty, env.score(task, empty))


def test_lines_about_nothing_are_left_out_and_slots_inside_texts_are_text(env):
    fields = {**env.tasks("heldout")[0].fields, "name": "[[MF]]", "gene": "X", "domains": "none", "notes": "note: a"}
    question = render(shipped_components(), fields)[-1].content
    assert question.startswith("[[MF]] (X), Homo sapiens\n")
    assert "domains:" not in question
    assert "partners:" not in question
    assert "notes: note: a" in question


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({"sytem": "x"}, "sytem"),
        ({"question": "[[NAME]] [[MF]] [[BP]]"}, "CC"),
        ({"demonstrations": "hello"}, "hello"),
        ({"demonstrations": "name: a\nname: b"}, "name: b"),
        ({"demonstrations": "name: a\nmf: b"}, "lacks bp, cc, answer"),
        ({"demonstrations": "name: a\nmf: b\nbp: c\ncc: d\nanswer: {}"}, "key summary is missing"),
    ],
)
def test_bad_components_are_refused(env, components, message):
    with pytest.raises(ConfigError, match=message):
        env.start(env.tasks("train")[0], components)


def test_components_can_be_replaced(env):
    task = env.tasks("train")[0]
    assert [m.role for m in env.start(task, {"demonstrations": ""}).messages] == ["system", "user"]
    changed = env.start(task, {"question": "[[CC]] [[BP]] [[MF]]\n[[NAME]]", "demonstrations": ""}).messages
    assert changed[-1].content.endswith(task.fields["name"])
