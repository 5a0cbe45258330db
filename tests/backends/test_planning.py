"""`new-run`: what is refused, what is written, and that parallel and killed processes do no harm."""

import json
import multiprocessing
import os
import signal
import tomllib
from dataclasses import replace

import pytest

from harness.backends import basis, planning
from harness.backends.basis import basis_of, code_facts, stored_basis
from harness.backends.planning import create_run, plan_run
from harness.config.load import config_sha, load_config
from harness.core.errors import ConfigError, InfraError, NotFoundError, RefusedError, UsageError
from harness.ledger import Ledger
from harness.program import Program, protocol_hashes, read_context
from harness.program.amend import amend


@pytest.fixture
def program(empty_program):
    return empty_program


def make(program, hypothesis="h", **request):
    return create_run(program, plan_run(program, hypothesis=hypothesis, **request))


def decide(program, run, decision="keep"):
    Ledger(program.ledger).append(run, "decided", {"decision": decision, "reason": "r"})


def runs(program):
    return Ledger(program.ledger).state().runs


def tree(program):
    return {p: p.read_bytes() for p in program.root.rglob("*") if p.is_file()}


EVALUATED_ENV = {
    "id": "drugprot",
    "args": {"source": "embedded", "variant": "hardened"},
    "sampling": {"max_tokens": 40, "temperature": 0.7},
}
"""What a first run trains on: the environment of CONTEXT.md, sampled as its protocol samples."""


@pytest.fixture
def first(program):
    run = make(program, "Defaults learn the task")
    decide(program, run)
    return run


def test_the_first_run(program, first):
    assert first == "run-001"
    assert tomllib.loads(program.config_path(first).read_text()) == {
        "hypothesis": "Defaults learn the task",
        "env": [EVALUATED_ENV],
    }
    created = runs(program)[first].created
    assert created["type"] == "training" and created["parent"] is None and created["changes"] == []
    assert created["config"] == "rl/run-001.toml"
    assert created["config_sha"] == config_sha(load_config(program.config_path(first)))
    assert created["protocol"] == protocol_hashes(program)
    facts = created["basis"]["environments"]["drugprot"]
    assert set(facts) == {
        "args",
        "version",
        "verifier",
        "tasks_sha",
        "eval_protocol",
        "eval_verifier",
        "eval_tasks_sha",
    }
    assert set(created["basis"]["code"]) == {"commit", "harness_sha", "training_version"}
    assert len(created["basis"]["prompts"]["drugprot"]) == 64


def test_a_change_is_one_sparse_file_and_one_event(program, first):
    run = make(program, "Alpha 64 learns faster than 32", sets=["lora.alpha=64"])
    assert run == "run-002"
    assert program.config_path(run).read_text().startswith('parent = "run-001"\n')
    assert tomllib.loads(program.config_path(run).read_text()) == {
        "parent": "run-001",
        "hypothesis": "Alpha 64 learns faster than 32",
        "lora": {"alpha": 64.0},
        "env": [EVALUATED_ENV],
    }
    created = runs(program)[run].created
    assert created["changes"] == [{"key": "lora.alpha", "old": 32.0, "new": 64.0, "kind": "config", "counts": True}]


def test_dry_run_touches_nothing(program, first):
    before = tree(program)
    plan = plan_run(program, hypothesis="x", sets=["lora.alpha=64"])
    assert plan.run == "run-002" and "alpha = 64.0" in plan.text and not plan.existing
    assert tree(program) == before


@pytest.mark.parametrize(
    ("request_", "error", "message", "hint"),
    [
        ({"hypothesis": "  "}, RefusedError, "needs a hypothesis", "--hypothesis"),
        ({}, RefusedError, "nothing differs from run-001", "--replicate"),
        ({"sets": ["lora.alpha=32"]}, RefusedError, "nothing differs from run-001", "--set"),
        ({"sets": ["train.seed=5"]}, RefusedError, "only train.seed differs", "--replicate"),
        ({"sets": ["lora.alpha=64", "lora.rank=32"]}, RefusedError, "2 changes to run-001 at once", "--group"),
        ({"sets": ["optimizer.name=lion"]}, ConfigError, "optimizer.name", ""),
        ({"sets": ["optimizer.name=muon"]}, RefusedError, "optimizer.name is frozen by CONTEXT.md", "harness amend"),
        ({"sets": ["model.name=other"]}, RefusedError, "model.name is frozen by CONTEXT.md", "harness amend"),
        ({"sets": ["lora.alpha=63"]}, RefusedError, "lora.alpha = 63.0 is outside", "--outside-plan"),
        ({"sets": ["sampling.context=512"]}, RefusedError, "not in the search space", "--outside-plan"),
        ({"sets": ["lora.aplha=64"]}, ConfigError, "unknown key 'lora.aplha'", "alpha"),
        ({"sets": ["env.drugprot.args.varaint=x"]}, ConfigError, "varaint", "variant"),
        ({"sets": ["env.drugprot.prompt=p9"]}, NotFoundError, "p9.toml", "shipped"),
        ({"sets": ["env.nope.id=nope"]}, NotFoundError, "nope", "drugprot"),
        ({"sets": ["env.drugprot="]}, ConfigError, "trains on no environment", "--set"),
        ({"from_run": "run-010", "sets": ["lora.alpha=64"]}, NotFoundError, "run-010", "run-001"),
        ({"replicate": True, "sets": ["lora.alpha=64"]}, RefusedError, "no replicate of run-001", ""),
        ({"replicate": True, "group": "x"}, UsageError, "no lever", ""),
        ({"replicate": True, "sets": ["train.seed=0"]}, RefusedError, "run-001 already ran with seed 0", "launch"),
        ({"group": "a b", "sets": ["lora.alpha=64"]}, UsageError, "lever", ""),
        ({"key": " ", "sets": ["lora.alpha=64"]}, UsageError, "key", ""),
    ],
)
def test_refusals_touch_nothing(program, first, request_, error, message, hint):
    before = tree(program)
    with pytest.raises(error) as caught:
        make(program, **request_)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert tree(program) == before


def test_a_lever_holds_several_changes_and_is_not_inherited(program, first):
    run = make(program, sets=["lora.alpha=64", "lora.rank=32"], group="adapter-size")
    created = runs(program)[run].created
    assert created["lever"] == "adapter-size" and len(created["changes"]) == 2
    child = make(program, sets=["train.steps=40"], from_run=run)
    assert runs(program)[child].created["lever"] is None
    assert "lever" not in program.config_path(child).read_text()


def test_leaving_the_plan_is_recorded(program, first):
    run = make(program, sets=["lora.alpha=63"], outside_plan="between the powers of two")
    assert runs(program)[run].created["outside_plan"] == "between the powers of two"


def test_the_first_run_obeys_frozen_keys_and_the_plan(program):
    with pytest.raises(RefusedError, match="frozen"):
        make(program, sets=["model.name=other"])
    with pytest.raises(RefusedError, match="outside"):
        make(program, sets=["lora.alpha=63"])
    assert make(program, sets=["lora.alpha=64", "train.steps=20", "train.seed=3"]) == "run-001"


def test_frozen_values_reach_the_first_run(program):
    text = program.context.read_text().replace(
        "[frozen]\n", '[frozen]\n"train.balance_labels" = false\n"lora.rank" = 8\n'
    )
    program.context.write_text(text)
    config = load_config(program.config_path(make(program)))
    assert config.train.balance_labels is False and config.lora.rank == 8
    with pytest.raises(RefusedError, match=r"lora.rank is frozen by CONTEXT.md at 8; this run sets 16"):
        make(program, from_run="run-001", sets=["lora.rank=16"])


def test_frozen_argument_of_an_environment(program, first):
    text = program.context.read_text().replace("[frozen]\n", '[frozen]\n"env.*.args.variant" = "hardened"\n')
    program.context.write_text(text)
    amend(program, "CONTEXT.md", "pay for form only with an answer")
    with pytest.raises(RefusedError, match=r"env.drugprot.args.variant is frozen"):
        make(program, sets=["env.drugprot.args.variant=published"])
    assert make(program, sets=["lora.alpha=64"]) == "run-002"


def test_an_argument_change_is_one_change(program, first):
    run = make(program, sets=["env.drugprot.args.variant=published"])
    counting = [item["key"] for item in runs(program)[run].created["changes"] if item["counts"]]
    assert counting == ["env.drugprot.args.variant"]
    with pytest.raises(RefusedError, match="nothing differs"):
        make(program, from_run=first, sets=["env.drugprot.args.variant="])


def test_the_parent_is_the_champion_else_the_last_kept(program, first):
    second = make(program, sets=["lora.alpha=64"])
    third = make(program, sets=["lora.rank=32"])
    assert plan_run(program, hypothesis="h", sets=["train.steps=40"]).config.parent == first
    decide(program, third)
    decide(program, second)
    assert plan_run(program, hypothesis="h", sets=["train.steps=40"]).config.parent == second
    Ledger(program.ledger).append(third, "promoted", {"verdict": "pass", "gates": []})
    plan = plan_run(program, hypothesis="h", sets=["train.steps=40"])
    assert plan.config.parent == third and plan.config.lora.rank == 32
    decide(program, first, "reject")
    assert plan_run(program, hypothesis="h", sets=["train.steps=40"], from_run=first).warnings


def test_without_a_kept_run_from_is_needed(program):
    make(program)
    with pytest.raises(RefusedError) as caught:
        make(program, sets=["lora.alpha=64"])
    assert "--from run-001" in caught.value.hint
    assert make(program, from_run="run-001", sets=["lora.alpha=64"]) == "run-002"


def test_a_duplicate_names_the_earlier_run(program, first):
    run = make(program, sets=["lora.alpha=64"])
    with pytest.raises(RefusedError, match=f"{run} already tests this") as caught:
        make(program, "the same in other words", sets=["lora.alpha=64.0", "train.seed=9", "checkpoint.keep=4"])
    assert "--replicate" in caught.value.hint
    # Also by another way round: from the child back to its parent.
    with pytest.raises(RefusedError, match=f"{first} already tests this"):
        make(program, from_run=run, sets=["lora.alpha=32"])


def test_replicates_take_the_next_seed_and_name_the_original(program, first):
    second = make(program, replicate=True)
    third = make(program, replicate=True, from_run=second)
    explicit = make(program, replicate=True, sets=["train.seed=7"])
    fourth = make(program, replicate=True)
    state = runs(program)
    seeds = [load_config(program.config_path(run)).train.seed for run in (first, second, third, explicit, fourth)]
    assert seeds == [0, 1, 2, 7, 3]
    assert {state[run].created["replicate_of"] for run in (second, third, explicit, fourth)} == {first}
    assert state[third].parent == second
    child = make(program, from_run=second, sets=["lora.alpha=64"])
    assert runs(program)[child].created["replicate_of"] is None


def test_an_idempotency_key_returns_its_run(program, first):
    run = make(program, sets=["lora.alpha=64"], key="job-17")
    before = tree(program)
    again = plan_run(program, hypothesis="h", sets=["lora.alpha=64"], key="job-17")
    assert again.existing and create_run(program, again) == run
    assert tree(program) == before
    with pytest.raises(UsageError, match=f"already made {run}"):
        make(program, "another", sets=["lora.rank=32"], key="job-17")


def test_an_unrecorded_edit_of_a_page_stops_new_runs(program, first):
    program.goal.write_text(program.goal.read_text().replace("0.20", "0.10"))
    with pytest.raises(RefusedError, match=r"GOAL.md changed"):
        make(program, sets=["lora.alpha=64"])
    amend(program, "GOAL.md", "a lower bar to begin with")
    assert make(program, sets=["lora.alpha=64"]) == "run-002"


def test_an_amended_protocol_is_shown_and_is_no_hypothesis(program, first):
    program.context.write_text(program.context.read_text().replace("items = 120", "items = 100"))
    amend(program, "CONTEXT.md", "fewer items")
    run = make(program, sets=["lora.alpha=64"])
    created = runs(program)[run].created
    assert [c["key"] for c in created["changes"] if c["counts"]] == ["lora.alpha"]
    assert "env.drugprot.eval_protocol" in [c["key"] for c in created["changes"]]


def test_code_that_moves_a_version_is_a_change(program, first, monkeypatch):
    monkeypatch.setattr(basis, "TRAINING_VERSION", "999")
    with pytest.raises(RefusedError, match=r"2 changes.*code.training_version"):
        make(program, sets=["lora.alpha=64"])
    run = make(program, "The new maths change nothing")
    assert [c["key"] for c in runs(program)[run].created["changes"] if c["counts"]] == ["code.training_version"]
    with pytest.raises(RefusedError, match="no replicate"):
        make(program, from_run=first, replicate=True)


def test_comments_of_the_parent_travel(program, first):
    path = program.config_path(first)
    path.write_text(path.read_text() + "\n# the embedded corpus is small\n[checkpoint]\nkeep = 2  # default\n")
    run = make(program, sets=["lora.alpha=64"])
    assert "# the embedded corpus is small" in program.config_path(run).read_text()


def test_a_parent_edited_after_its_run_is_not_copied(program, first):
    path = program.config_path(first)
    path.write_text(path.read_text() + "[lora]\nrank = 64\n")
    run = make(program, sets=["lora.alpha=64"])
    assert load_config(program.config_path(run)).lora.rank == 16


def test_what_the_parent_started_with_is_what_a_child_changes(program, first):
    recorded = stored_basis(runs(program)[first])
    assert recorded is not None
    config = {**recorded.config, "lora": {**recorded.config["lora"], "rank": 32}}
    started = replace(recorded, config=config).to_json()
    Ledger(program.ledger).append(first, "started", {"attempt": 1, "basis": started})
    plan = plan_run(program, hypothesis="h", sets=["lora.alpha=64"])
    assert plan.config.lora.rank == 32 and [c.key for c in plan.changes.counting] == ["lora.alpha"]


def test_a_searched_prompt_is_one_change_and_its_text_is_hashed(program, first):
    path = program.prompt_path("drugprot", "p1")
    path.parent.mkdir(parents=True)
    name = next(iter(basis.load_environment("drugprot", {}).components()))
    path.write_text(f'[components]\n{name} = "Answer."\n')
    run = make(program, sets=["env.drugprot.prompt=p1"])
    assert [c["key"] for c in runs(program)[run].created["changes"] if c["counts"]] == ["env.drugprot.prompt"]
    path.write_text(f'[components]\n{name} = "Answer now."\n')
    run = make(program, "A sharper text", from_run=run)
    assert [c["key"] for c in runs(program)[run].created["changes"] if c["counts"]] == ["env.drugprot.prompt_sha"]
    path.write_text('[components]\nnope = "x"\n')
    with pytest.raises(ConfigError, match="nope"):
        make(program, from_run=run)


def test_an_orphan_config_blocks_nothing_and_is_not_lost(program, first):
    orphan = program.rl / "run-002.toml"
    orphan.write_text("# half a thought\n")
    assert make(program, sets=["lora.alpha=64"]) == "run-002"
    assert load_config(orphan).lora.alpha == 64
    (kept,) = (program.outputs / "orphans").iterdir()
    assert kept.read_text() == "# half a thought\n"


def test_a_full_disk_leaves_no_config_behind(program, first, monkeypatch):
    def fail(*_):
        raise InfraError("cannot append: No space left on device")

    monkeypatch.setattr(Ledger, "_write", fail)
    with pytest.raises(InfraError):
        make(program, sets=["lora.alpha=64"])
    assert not program.config_path("run-002").exists()
    monkeypatch.undo()
    assert make(program, sets=["lora.alpha=64"]) == "run-002"


def test_a_text_the_ledger_cannot_hold_leaves_no_config_behind(program, first):
    with pytest.raises(UsageError):
        make(program, sets=["lora.alpha=64"], key="\udcff")
    assert not program.config_path("run-002").exists()


def _new_run(root, number, barrier, results):
    program = Program(root)
    plan = plan_run(program, hypothesis=f"h{number}", sets=[f"optimizer.learning_rate={(number + 30) * 1e-5}"])
    barrier.wait()
    results.put((number, create_run(program, plan)))


def test_twenty_parallel_processes_make_twenty_runs(program, first):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(20), context.Queue()
    workers = [
        context.Process(target=_new_run, args=(program.root, n, barrier, results), daemon=True) for n in range(20)
    ]
    for worker in workers:
        worker.start()
    made = dict(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    assert sorted(made.values()) == [f"run-{n:03d}" for n in range(2, 22)]
    for number, run in made.items():
        config = load_config(program.config_path(run))
        assert config.hypothesis == f"h{number}" and config.optimizer.learning_rate == (number + 30) * 1e-5
        assert runs(program)[run].config_sha == config_sha(config)
    assert len(list(program.rl.glob("run-*.toml"))) == 21


def _replicate(root, barrier):
    program = Program(root)
    plan = plan_run(program, hypothesis="again", replicate=True)
    barrier.wait()
    create_run(program, plan)


def test_parallel_replicates_get_distinct_seeds(program, first):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(5)
    workers = [context.Process(target=_replicate, args=(program.root, barrier)) for _ in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    configs = [load_config(path) for path in program.rl.glob("run-*.toml")]
    assert sorted(config.train.seed for config in configs) == [0, 1, 2, 3, 4, 5]


def _with_key(root, barrier, results):
    program = Program(root)
    plan = plan_run(program, hypothesis="once", sets=["lora.alpha=64"], key="job-1")
    barrier.wait()
    results.put(create_run(program, plan))


def test_parallel_requests_with_one_key_make_one_run(program, first):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_with_key, args=(program.root, barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert {results.get(timeout=60) for _ in workers} == {"run-002"}
    for worker in workers:
        worker.join()
    assert list(runs(program)) == ["run-001", "run-002"]


def _die_between_config_and_event(root):
    program = Program(root)
    original = planning.atomic_write

    def write_then_die(path, data):
        original(path, data)
        os.kill(os.getpid(), signal.SIGKILL)

    planning.atomic_write = write_then_die
    create_run(program, plan_run(program, hypothesis="dies", sets=["lora.alpha=64"]))


def test_a_kill_between_config_and_event_blocks_nothing(program, first):
    worker = multiprocessing.get_context("fork").Process(target=_die_between_config_and_event, args=(program.root,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    assert program.config_path("run-002").exists() and "run-002" not in runs(program)
    assert make(program, "lives", sets=["lora.rank=32"]) == "run-002"
    assert load_config(program.config_path("run-002")).hypothesis == "lives"


def test_a_basis_is_the_same_when_read_twice_and_json(program, first):
    config = load_config(program.config_path(first))
    one, two = basis_of(program, config), basis_of(program, config, read_context(program))
    assert one == two == stored_basis(runs(program)[first])
    assert json.loads(json.dumps(one.to_json())) == one.to_json()


def test_code_facts_see_files_and_not_caches(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    one = code_facts(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert code_facts(tmp_path) == one and one["commit"] is None
    (tmp_path / "a.py").write_text("x = 2\n")
    assert code_facts(tmp_path)["harness_sha"] != one["harness_sha"]


def test_a_frozen_value_that_no_config_can_have(program):
    text = program.context.read_text().replace("[frozen]\n", '[frozen]\n"lora.rank" = "big"\n')
    program.context.write_text(text)
    with pytest.raises(ConfigError, match=r"CONTEXT\.md freezes lora\.rank at a value it cannot have"):
        make(program)
