"""What `launch` checks again."""

import pytest

from harness.backends import basis
from harness.backends.launch import check_launch, prepare_launch
from harness.backends.planning import create_run, plan_run
from harness.core.errors import ConfigError, NotFoundError, RefusedError
from harness.ledger import Ledger
from harness.program.amend import amend


@pytest.fixture
def program(empty_program):
    program = empty_program
    make(program, "Defaults learn")
    Ledger(program.ledger).append("run-001", "decided", {"decision": "keep", "reason": "r"})
    make(program, "Alpha 64 is faster", sets=["lora.alpha=64"])
    return program


def make(program, hypothesis, **request):
    return create_run(program, plan_run(program, hypothesis=hypothesis, **request))


def edit(program, run, old, new):
    path = program.config_path(run)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def start(program, run):
    data = prepare_launch(program, run).event_data()
    Ledger(program.ledger).append(run, "started", {"attempt": 1, **data})


def test_an_untouched_run_may_launch(program):
    assert check_launch(program, "run-001") == []
    (change,) = check_launch(program, "run-002")
    assert (change.key, change.old, change.new, change.counts) == ("lora.alpha", 32.0, 64.0, True)
    data = prepare_launch(program, "run-002").event_data()
    assert set(data) == {"config_sha", "basis", "protocol", "changes_at_launch"}


def test_checking_writes_nothing(program):
    before = {p: p.read_bytes() for p in program.root.rglob("*") if p.is_file()}
    check_launch(program, "run-002")
    assert {p: p.read_bytes() for p in program.root.rglob("*") if p.is_file()} == before


def test_a_hand_edited_value_of_the_declared_key_is_taken_and_recorded(program):
    edit(program, "run-002", "alpha = 64.0", "alpha = 128")
    assert [change.new for change in check_launch(program, "run-002")] == [128.0]


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("alpha = 64.0", "alpha = 64.0\nrank = 32", RefusedError, "lora.rank: 16 → 32"),
        ("alpha = 64.0", "rank = 32", RefusedError, "no longer tests only its hypothesis"),
        ("alpha = 64.0", "alpha = 32", RefusedError, "nothing differs from run-001"),
        ("alpha = 64.0", "alpha = 63", RefusedError, "outside PLAN.md"),
        ("alpha = 64.0", "aplha = 64", ConfigError, "unknown key 'lora.aplha'"),
        ("Alpha 64 is faster", "Alpha 64 is safer", RefusedError, "hypothesis in rl/run-002.toml"),
        ('parent = "run-001"\n', "", RefusedError, "parent in rl/run-002.toml"),
        ("[lora]", '[model]\nname = "other"\n[lora]', RefusedError, "model.name is frozen"),
        ("[lora]", "lever = 'all'\n\n[lora]", RefusedError, "lever in rl/run-002.toml"),
    ],
)
def test_a_hand_edit_that_breaks_a_rule_is_refused(program, old, new, error, message):
    edit(program, "run-002", old, new)
    with pytest.raises(error) as caught:
        check_launch(program, "run-002")
    assert message in caught.value.message


def test_a_first_run_may_be_edited_inside_the_plan(program):
    edit(program, "run-001", "[[env]]", "[lora]\nrank = 32\n\n[[env]]")
    assert check_launch(program, "run-001") == []
    edit(program, "run-001", "rank = 32", "rank = 33")
    with pytest.raises(RefusedError, match=r"lora\.rank = 33 is outside"):
        check_launch(program, "run-001")


def test_a_nuisance_edit_is_fine_before_the_first_attempt(program):
    edit(program, "run-002", "[lora]", "[train]\nseed = 4\n[checkpoint]\nkeep = 5\n[lora]")
    assert {change.key for change in check_launch(program, "run-002") if not change.counts} == {
        "train.seed",
        "checkpoint.keep",
    }


def test_an_edit_into_a_duplicate_is_refused(program):
    make(program, "Alpha 128", sets=["lora.alpha=128"])
    edit(program, "run-002", "alpha = 64.0", "alpha = 128.0")
    with pytest.raises(RefusedError, match="the same as run-003"):
        check_launch(program, "run-002")


@pytest.mark.parametrize("name", ["GOAL.md", "CONTEXT.md", "PLAN.md"])
def test_an_edited_page_needs_an_amendment(program, name):
    page = program.root / name
    page.write_text(page.read_text() + "\nmore\n")
    with pytest.raises(RefusedError, match=name):
        check_launch(program, "run-002")
    amend(program, name, "more prose")
    assert len(check_launch(program, "run-002")) == 1


def test_a_version_that_moved_since_creation_is_refused(program, monkeypatch):
    now = basis.TRAINING_VERSION
    monkeypatch.setattr(basis, "TRAINING_VERSION", "999")
    with pytest.raises(RefusedError, match=rf"code.training_version: {now} → 999"):
        check_launch(program, "run-002")
    assert check_launch(program, "run-001") == []


def test_a_lever_does_not_cover_what_it_did_not_declare(program, monkeypatch):
    run = make(program, "size", sets=["lora.alpha=128", "lora.rank=32"], group="size")
    assert len(check_launch(program, run)) == 2
    monkeypatch.setattr(basis, "TRAINING_VERSION", "999")
    with pytest.raises(RefusedError, match="this moved"):
        check_launch(program, run)


def test_a_replicate_must_still_be_one(program, monkeypatch):
    run = make(program, "again", replicate=True)
    assert [change.key for change in check_launch(program, run)] == ["train.seed"]
    monkeypatch.setattr(basis, "TRAINING_VERSION", "999")
    with pytest.raises(RefusedError, match="no replicate"):
        check_launch(program, run)


def test_a_later_attempt_repeats_the_first(program, monkeypatch):
    start(program, "run-002")
    assert len(check_launch(program, "run-002")) == 1
    edit(program, "run-002", "[lora]", "[budget]\ntokens = 9\n[checkpoint]\nkeep = 5\n[lora]")
    check_launch(program, "run-002")
    edit(program, "run-002", "[budget]", "[train]\nseed = 4\n[budget]")
    with pytest.raises(RefusedError, match=r"started with something else: train.seed: 0 → 4"):
        check_launch(program, "run-002")
    edit(program, "run-002", "seed = 4", "seed = 0")
    edit(program, "run-002", "alpha = 64.0", "alpha = 128.0")
    with pytest.raises(RefusedError, match=r"started with something else: lora.alpha"):
        check_launch(program, "run-002")
    edit(program, "run-002", "alpha = 128.0", "alpha = 64.0")
    monkeypatch.setattr(basis, "TRAINING_VERSION", "999")
    with pytest.raises(RefusedError, match=r"started with something else: code.training_version"):
        check_launch(program, "run-002")


def test_an_attempt_does_not_mix_two_protocols(program):
    start(program, "run-002")
    program.context.write_text(program.context.read_text() + "\nprose only\n")
    amend(program, "CONTEXT.md", "prose")
    check_launch(program, "run-002")
    program.context.write_text(program.context.read_text().replace("items = 120", "items = 100"))
    amend(program, "CONTEXT.md", "fewer items")
    with pytest.raises(RefusedError, match="eval_protocol"):
        check_launch(program, "run-002")


def test_unknown_and_missing(program):
    with pytest.raises(NotFoundError, match="no run 'run-009'"):
        check_launch(program, "run-009")
    program.config_path("run-002").unlink()
    with pytest.raises(NotFoundError, match=r"run-002.toml does not exist"):
        check_launch(program, "run-002")
    Ledger(program.ledger).append("run-007", "created", {"type": "prompt_search", "hypothesis": "h"})
    with pytest.raises(RefusedError, match="prompt_search"):
        check_launch(program, "run-007")
