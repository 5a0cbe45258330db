"""The environment as its users see it: registry, arguments, splits, prompt, permuted letters, baselines."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.errors import ConfigError, NotFoundError, RefusedError
from harness.core.paths import cache_dir
from harness.core.types import Episode, FinishReason, Message, Task
from harness.envs.base import demonstration, merge_components
from harness.envs.drugprot.baselines import accuracy, constant_baselines, keyword_baseline
from harness.envs.drugprot.environment import PERMUTED_LETTERS, DrugProt
from harness.envs.drugprot.labels import LABELS, LETTERS, letter_of
from harness.envs.drugprot.prompt import options_text, parse_demonstrations, render, shipped_components
from harness.envs.drugprot.verifier import parse_reply
from harness.envs.registry import ENVIRONMENTS, check_disjoint, load_environment, tasks_sha

SHARED = Path(os.environ.get("HARNESS_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
TSV = SHARED / "drugprot" / "bioc_train_subset"
needs_data = pytest.mark.skipif(
    not TSV.exists(), reason=f"no real DrugProt data at {TSV}; set HARNESS_SHARED_DATA to the shared data folder"
)
SPLITS = ("train", "heldout", "heldout-permuted")


@pytest.fixture(scope="module")
def env():
    return load_environment("drugprot")


def reply(task, text):
    return Episode(task.id, (Message("assistant", text),), FinishReason.STOP)


def test_registry_ids_and_versions(env):
    assert all(spec.id == name and spec.summary for name, spec in ENVIRONMENTS.items())
    assert env.id == "drugprot"
    published = load_environment("drugprot", {"variant": "published"})
    assert published.verifier_version != env.verifier_version
    assert published.version == env.version
    assert env.component_names() == ("accuracy", "reasoning", "format")


@pytest.mark.parametrize(
    ("name", "args", "error", "hint"),
    [
        ("drugport", {}, NotFoundError, "drugprot"),
        ("drugprot", {"sorce": "official"}, ConfigError, "source"),
        ("drugprot", {"source": "offical"}, ConfigError, "env show"),
        ("drugprot", {"variant": 1}, ConfigError, "env show"),
        ("drugprot", {"path": "x"}, ConfigError, "official"),
        ("drugprot", {"source": "official"}, ConfigError, "HARNESS_DRUGPROT"),
        ("drugprot", {"source": "official", "path": "nowhere"}, NotFoundError, "path"),
    ],
)
def test_bad_names_and_arguments(monkeypatch, name, args, error, hint):
    monkeypatch.delenv("HARNESS_DRUGPROT", raising=False)
    with pytest.raises(error) as caught:
        load_environment(name, args)
    assert hint in caught.value.hint


def test_unknown_split(env):
    with pytest.raises(NotFoundError, match="held-out") as caught:
        env.tasks("held-out")
    assert "heldout" in caught.value.hint


def test_train_and_heldout_are_disjoint(env):
    check_disjoint(env)


@pytest.mark.parametrize("what", ["task id", "task content", "cluster"])
def test_overlap_is_refused(env, what):
    stray = env.tasks("heldout")[0]
    fresh = {
        "task id": replace(stray, fields={**stray.fields, "abstract": "new"}, cluster="new"),
        "task content": replace(stray, cluster="new"),
        "cluster": replace(stray, id="new"),
    }[what]

    class Leaky(DrugProt):
        def tasks(self, split):
            return (*super().tasks(split), fresh) if split == "train" else super().tasks(split)

    with pytest.raises(RefusedError):
        check_disjoint(Leaky())


def test_tasks_sha_sees_content_order_and_split(env):
    hashes = {split: tasks_sha(env, split) for split in SPLITS}
    assert len(set(hashes.values())) == 3

    class Reversed(DrugProt):
        def tasks(self, split):
            return super().tasks(split)[::-1]

    assert tasks_sha(Reversed(), "heldout") != hashes["heldout"]
    assert tasks_sha(load_environment("drugprot", {"variant": "published"}), "train") == hashes["train"]


def test_task_ids_are_unique_and_answers_are_letters(env):
    tasks = [task for split in SPLITS for task in env.tasks(split)]
    assert len({task.id for task in tasks}) == len(tasks)
    assert all(task.answer == letter_of(task.label, task.fields["letters"]) for task in tasks)


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_of_a_split_share_everything_but_the_question(env, split):
    tasks = env.tasks(split)
    prefixes = {env.start(task).messages[:-1] for task in tasks}
    assert len(prefixes) == 1
    roles = [message.role for message in next(iter(prefixes))]
    assert roles == ["system", *["user", "assistant"] * 10]
    last = env.start(tasks[0]).messages[-1]
    fields = tasks[0].fields
    assert last == Message(
        "user",
        f"{fields['abstract']}\nDrug/Chemical: {fields['chemical']}\nGene/Protein: {fields['protein']}",
    )
    assert env.start(tasks[0]).step("anything") is None


def test_shared_prefix_is_short(env):
    """About 870 tokens of the embedded model; measured as characters, since this tier has no tokenizer."""
    prefix = env.start(env.tasks("heldout")[0]).messages[:-1]
    assert sum(len(message.content) for message in prefix) < 3_600


def test_e3_17_the_prompt_does_not_depend_on_the_gold(env):
    task = env.tasks("heldout")[0]
    other = replace(task, answer="M", label="PART-OF", cluster="x", meta={"source": "y"})
    assert env.start(task).messages == env.start(other).messages


@pytest.mark.parametrize("split", ["heldout", "heldout-permuted"])
@pytest.mark.parametrize("variant", ["hardened", "published"])
def test_demonstrations_would_score_full_marks_for_their_form(split, variant):
    env = load_environment("drugprot", {"variant": variant})
    task = env.tasks(split)[0]
    messages = env.start(task).messages
    records = parse_demonstrations(env.components()["demonstrations"])
    for record, message in zip(records, messages[2::2], strict=True):
        gold = letter_of(record["label"], task.fields["letters"])
        score = env.score(replace(task, answer=gold), reply(task, message.content))
        assert score.components["accuracy"] == score.components["format"] == 1.0
        assert score.components["reasoning"] >= 0.2  # names a chemical or drug, and a protein
        assert parse_reply(message.content).think == record["think"]


def test_permuted_split_differs_in_letters_only(env):
    for plain, permuted in zip(env.tasks("heldout"), env.tasks("heldout-permuted"), strict=True):
        assert permuted.label == plain.label
        assert permuted.cluster == plain.cluster
        assert {**permuted.fields, "letters": LETTERS} == plain.fields
        assert permuted.answer != plain.answer
    system = env.start(env.tasks("heldout-permuted")[0]).messages[0].content
    assert options_text(PERMUTED_LETTERS) in system
    assert options_text(LETTERS) not in system


def test_permuted_split_exposes_a_letter_prior(env):
    def always_the_usual_letter(task: Task) -> str:
        return letter_of(task.label)  # a policy that learned letters, whatever the options say

    assert accuracy(env.tasks("heldout"), always_the_usual_letter) == 1.0
    assert accuracy(env.tasks("heldout-permuted"), always_the_usual_letter) == 0.0
    assert accuracy(env.tasks("heldout-permuted"), keyword_baseline) == accuracy(env.tasks("heldout"), keyword_baseline)


def test_options_are_in_letter_order():
    assert options_text(LETTERS).split("\n")[4] == "E. INHIBITOR"
    lines = options_text(PERMUTED_LETTERS).split("\n")
    assert [line[0] for line in lines] == list(LETTERS)
    assert {line[3:] for line in lines} == set(LABELS)


def test_published_layout_is_one_component_away(env):
    """The question of the published environment, given as a searched prompt would be."""
    layout = (
        "Abstract:\n[[ABSTRACT]]\n\nDrug/Chemical: [[CHEMICAL]]\nGene/Protein: [[PROTEIN]]\n\n"
        "Question:\nWhat is the relation type between [[CHEMICAL]] and [[PROTEIN]]?"
    )
    task = env.tasks("heldout")[0]
    fields = task.fields
    assert env.start(task, {"question": layout}).messages[-1].content == (
        f"Abstract:\n{fields['abstract']}\n\nDrug/Chemical: {fields['chemical']}\nGene/Protein: {fields['protein']}\n\n"
        f"Question:\nWhat is the relation type between {fields['chemical']} and {fields['protein']}?"
    )


def test_components_can_be_replaced(env):
    task = env.tasks("train")[0]
    short = env.start(task, {"demonstrations": ""}).messages
    assert [message.role for message in short] == ["system", "user"]
    changed = env.start(task, {"question": "[[PROTEIN]]? [[CHEMICAL]]! [[ABSTRACT]]"}).messages
    assert changed[-1].content == f"{task.fields['protein']}? {task.fields['chemical']}! {task.fields['abstract']}"


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({"sytem": "x"}, "sytem"),
        ({"system": "no options"}, "OPTIONS"),
        ({"question": "[[ABSTRACT]] [[CHEMICAL]]"}, "PROTEIN"),
        ({"demonstrations": "hello"}, "hello"),
        ({"demonstrations": "abstract: a\nchemical: b"}, "lacks"),
        ({"demonstrations": "abstract: a\nabstract: b"}, "abstract: b"),
        ({"demonstrations": "abstract: a\nchemical: b\nprotein: c\nlabel: INHIBIT\nthink: d"}, "INHIBIT"),
    ],
)
def test_bad_components_are_refused(env, components, message):
    with pytest.raises(ConfigError, match=message):
        env.start(env.tasks("train")[0], components)


def test_slots_inside_an_abstract_are_text():
    fields = {"abstract": "[[PROTEIN]] [[OPTIONS]]", "chemical": "c", "protein": "[[ABSTRACT]]", "letters": LETTERS}
    content = render({**shipped_components(), "demonstrations": ""}, fields)[-1].content
    assert "[[PROTEIN]] [[OPTIONS]]" in content
    assert "Gene/Protein: [[ABSTRACT]]" in content


def test_merge_keeps_the_shipped_texts():
    shipped = {"a": "1", "b": "2"}
    assert merge_components(shipped, {"b": "3"}) == {"a": "1", "b": "3"}
    assert merge_components(shipped, None) == shipped


def test_keyword_baseline_reads_the_cue():
    def task(abstract, label="INHIBITOR"):
        fields = {"abstract": abstract, "chemical": "zinc", "protein": "KIT", "letters": LETTERS}
        return Task("t", "drugprot", "heldout", fields, letter_of(label), label, "c")

    assert keyword_baseline(task("Zinc blocked KIT.")) == "E"
    assert keyword_baseline(task("Zinc is an antagonist of KIT.")) == "I"
    assert keyword_baseline(task("Zinc is an agonist of KIT.")) == "F"
    assert keyword_baseline(task("Agonists were used. Zinc binds KIT.")) == "C"
    assert keyword_baseline(task("Zinc reduced KIT mRNA.")) == "A"
    assert keyword_baseline(task("Nothing here.")) == "E"


def test_baselines_know_more_than_one_letter(env):
    tasks = env.tasks("heldout")
    constant = constant_baselines(tasks)
    assert sum(constant.values()) == pytest.approx(1.0)
    assert constant["INHIBITOR"] == Counter(t.label for t in tasks)["INHIBITOR"] / len(tasks)
    assert max(constant.values()) < accuracy(tasks, keyword_baseline) < 1.0
    with pytest.raises(ValueError, match="no tasks"):
        accuracy((), keyword_baseline)


def test_a_prompt_may_go_without_examples(env):
    task = env.tasks("train")[0]
    shipped, short = env.start(task).messages, env.start(task, {"demonstrations": ""}).messages
    assert [message.role for message in short] == ["system", "user"]
    assert short == (shipped[0], shipped[-1])


def test_every_training_task_has_a_demonstration_that_is_scored_as_right(env):
    for task in (*env.tasks("train"), *env.tasks("heldout-permuted")):
        text = demonstration(env, task)
        score = env.score(task, reply(task, text))
        assert (score.failure, score.components["accuracy"], score.components["format"]) == (None, 1.0, 1.0), text
        assert score.components["reasoning"] >= 0.2  # a drug or chemical, and a protein
        assert text is not None and task.label in text and text.endswith(f"\\boxed{{{task.answer}}}")
    assert demonstration(env, replace(env.tasks("train")[0], label="AGONIST-INHIBITOR")) is None


def test_demonstrations_are_short_for_the_embedded_model(env):
    tokenizers = pytest.importorskip("tokenizers")
    found = list((cache_dir() / "models").glob("smollm2-135m-*/tokenizer.json"))
    if not found:
        pytest.skip("the embedded model is not in the cache")
    tokenizer = tokenizers.Tokenizer.from_file(str(found[0]))
    texts = {demonstration(env, task) for task in env.tasks("train")}
    assert (
        max(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts) + 1 <= 28
    )  # one ends the turn


@needs_data
def test_official_source_by_argument_and_by_variable(monkeypatch):
    env = load_environment("drugprot", {"source": "official", "path": str(TSV)})
    check_disjoint(env)
    assert env.version != load_environment("drugprot").version
    assert env.corpus.stats.embedded_dropped > 0
    whole = load_environment("drugprot", {"source": "official", "path": str(TSV), "exclude_embedded": False})
    assert len(whole.tasks("heldout")) == len(env.tasks("heldout")) + env.corpus.stats.embedded_dropped
    assert whole.tasks("train") == env.tasks("train")
    monkeypatch.setenv("HARNESS_DRUGPROT", str(TSV))
    assert load_environment("drugprot", {"source": "official"}).tasks("train") == env.tasks("train")
    assert len(env.start(env.tasks("train")[0]).messages) == 22
