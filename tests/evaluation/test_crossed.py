"""The six evals of a prompt's effect: what is on record is read back, what is missing is made, once."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from harness.cli.main import main  # noqa: E402
from harness.core.errors import RefusedError  # noqa: E402
from harness.envs.registry import ENVIRONMENTS  # noqa: E402
from harness.evaluation import crossed  # noqa: E402
from harness.evaluation.effect import CELLS, EFFECTS, VERDICTS  # noqa: E402
from harness.evaluation.heldout import Recorder, load_suites, run_suite  # noqa: E402
from harness.evaluation.records import read_items  # noqa: E402
from harness.evaluation.statistics import paired_difference  # noqa: E402
from harness.inference.lora import WEIGHTS  # noqa: E402
from harness.ledger import Ledger  # noqa: E402
from harness.ledger.results import last_policy_evals  # noqa: E402
from harness.ledger.verify import verify  # noqa: E402
from harness.program import Program, init_program, read_context  # noqa: E402
from tests.evaluation.test_heldout import Policy, loaded  # noqa: E402
from tests.launches import _rewrite  # noqa: E402
from tests.toy_env import SPEC  # noqa: E402

SEED, CHOSEN = "run-001", "run-002"
PROMPT = '[components]\nsystem = "Write early letters."\n'


class Engine(Policy):
    """Answers by its adapter, and a little better under the longer prompt."""

    made: ClassVar[list] = []

    def __init__(self, model, adapted):
        super().__init__({None: 0, SEED: 5, CHOSEN: 9}[adapted])
        Engine.made.append(adapted)


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "toy", SPEC)
    monkeypatch.setenv("HARNESS_ACTOR", "agent:tester")
    monkeypatch.setattr(crossed, "load_model", lambda section: loaded())
    monkeypatch.setattr(crossed, "load_adapter", lambda model, folder: folder.parents[1].name)
    monkeypatch.setattr(crossed, "TransformersEngine", Engine)
    Engine.made = []
    root = tmp_path / "program"
    init_program(root, git=False)
    _rewrite(root / "GOAL.md", {'id = "drugprot"': 'id = "toy"', '["accuracy"]': '["early"]'})
    changes = {'id = "drugprot"': 'id = "toy"', "items = 120": "items = 6"}
    _rewrite(root / "CONTEXT.md", changes | {'args = { source = "embedded", variant = "hardened" }\n': ""})
    found = Program(root)
    prompt = found.prompt_path("toy", "early")
    prompt.parent.mkdir(parents=True)
    prompt.write_text(PROMPT)
    ledger = Ledger(found.ledger)
    for run, name in ((SEED, "shipped"), (CHOSEN, "early")):
        found.config_path(run).write_text(f'hypothesis = "h"\n[[env]]\nid = "toy"\nprompt = "{name}"\n')
        weights = found.run_dir(run) / "adapters" / "step_4" / WEIGHTS
        weights.parent.mkdir(parents=True)
        weights.write_text(run)
        ledger.append(run, "created", {"type": "training", "hypothesis": "h"})
    return found


def measure(program):
    return crossed.prompt_effect(program, SEED, CHOSEN, lambda update: None)


def files(program):
    return sorted(str(path.relative_to(program.analysis)) for path in program.analysis.glob("*/evals/*.jsonl"))


def test_all_six_are_made_recorded_and_summed_up(program):
    (row,) = measure(program)
    assert Engine.made == [None, SEED, CHOSEN]
    assert files(program) == [
        *("run-001/evals/step_0.base.toy.jsonl", "run-001/evals/step_4.policy.toy.jsonl"),
        "run-001/evals/step_4.policy.toy.run-002.jsonl",
        *("run-002/evals/step_0.base.toy.jsonl", "run-002/evals/step_4.policy.toy.jsonl"),
        "run-002/evals/step_4.policy.toy.run-001.jsonl",
    ]
    assert [(cell["model"], cell["prompt"]) for cell in row["cells"]] == list(CELLS)
    assert {cell["n"] for cell in row["cells"]} == {6}
    chosen, seed = (
        read_items(program.analysis / name)
        for name in ("run-002/evals/step_4.policy.toy.jsonl", "run-001/evals/step_4.policy.toy.jsonl")
    )
    expected = paired_difference(list(chosen), list(seed))
    assert row["effects"]["reward"]["prompt_after"]["mean"] == pytest.approx(expected.mean)
    assert row["differs"] == []
    state = Ledger(program.ledger).state()
    (event,) = state.runs[CHOSEN].of_kind("prompt_effect")
    assert event.data == row
    assert not [found for found in verify(program.ledger, program.root) if found.severity == "error"]


def test_what_is_on_record_is_not_made_again(program):
    first = measure(program)
    Engine.made.clear()
    assert measure(program) == first
    assert Engine.made == []
    assert len(Ledger(program.ledger).state().runs[CHOSEN].of_kind("prompt_effect")) == 1
    # an edited file answers for nothing: that eval is made again, and only that one
    path = program.analysis / "run-001/evals/step_4.policy.toy.run-002.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"reward":', b'"reward": '))
    assert measure(program) == first
    assert Engine.made == [SEED]


def test_evals_that_a_launch_recorded_are_used(program):
    context = read_context(program)
    (suite,) = load_suites(context)
    place = crossed._places(
        suite,
        {n: crossed._side(program, Ledger(program.ledger).state(), r) for n, r in (("seed", SEED), ("chosen", CHOSEN))},
    )["base", "chosen"]
    items = run_suite(suite, Policy(0), loaded(), context, place.texts, lambda update: None)
    recorder = Recorder(program, Ledger(program.ledger), CHOSEN, 0, context)
    recorder.record(suite, items, "base", 0, "run", place.prompt_sha, None)
    before = (program.analysis / "run-002/evals/step_0.base.toy.jsonl").read_bytes()
    measure(program)
    assert (program.analysis / "run-002/evals/step_0.base.toy.jsonl").read_bytes() == before
    evals = Ledger(program.ledger).state().runs[CHOSEN].evals
    assert sum((data["subject"], data["prompt"]) == ("base", "run") for data in evals) == 1


def test_the_other_prompt_is_never_taken_for_the_runs_own(program):
    measure(program)
    run = Ledger(program.ledger).state().runs[CHOSEN]
    assert last_policy_evals(run)["toy"]["prompt"] == "run"
    swapped = next(data for data in run.evals if data["prompt"] == SEED)
    assert "gain" not in swapped and "gain_shipped" not in swapped


def test_equal_prompts_other_models_and_changed_files_are_refused(program):
    with pytest.raises(RefusedError, match="the same prompt"):
        crossed.prompt_effect(program, SEED, SEED, lambda update: None)
    measure(program)
    path = program.prompt_path("toy", "early")
    path.write_text(PROMPT.replace("early", "late"))
    with pytest.raises(RefusedError, match="its file was changed since"):
        measure(program)
    path.write_text(PROMPT)
    config = program.config_path(SEED)
    config.write_text(config.read_text() + '[model]\nname = "other"\n')
    with pytest.raises(RefusedError, match="other base models"):
        measure(program)


def test_other_differences_of_the_two_runs_are_named(program):
    config = program.config_path(CHOSEN)
    config.write_text(config.read_text() + "[lora]\nrank = 8\n")
    (row,) = measure(program)
    assert row["differs"] == ["lora.rank"]


def test_the_command_shows_the_table_and_the_verdict(program, monkeypatch, capsys):
    monkeypatch.chdir(program.root)
    monkeypatch.delenv("HARNESS_PROGRAM", raising=False)
    assert main(["eval", CHOSEN, "--prompt-effect", SEED, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert main(["eval", CHOSEN, "--prompt-effect", SEED]) == 0
    shown = capsys.readouterr().out
    found = row["verdict"]["reward"]
    assert f"{found}: {VERDICTS[found]}" in shown
    for effect in EFFECTS:
        assert effect.title in shown
    assert main(["eval", CHOSEN, "--prompt-effect", SEED, "--step", "4", "--json"]) == 2
    assert main(["eval", "run-009", "--prompt-effect", SEED, "--json"]) == 2
    assert main(["log", CHOSEN]) == 0
    assert "under the seed prompt" in capsys.readouterr().out
