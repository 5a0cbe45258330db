"""`harness search-prompt` with an engine that answers from its prompt: ledger, files, resume, refusals."""

from __future__ import annotations

import json
import tomllib

import pytest

pytest.importorskip("torch")
pytest.importorskip("gepa")

from harness.backends import search as backend
from harness.backends.local import _training_env
from harness.cli.main import main
from harness.config.schema import EnvSection, RunConfig
from harness.envs.registry import ENVIRONMENTS
from harness.ledger import Ledger
from harness.ledger.process import this_process
from harness.ledger.verify import check
from harness.program import Program, init_program, read_prompt
from harness.program.prompts import shown_tasks
from harness.prompt_search.adapter import Player
from harness.rollouts.collect import Sampling
from tests.prompt_search.chat_server import KEY, serving, status, streamed
from tests.prompt_search.support import END, SPEC, Letters, Solver

SEARCH = ("search-prompt", "riddles", "--budget", "160")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    root = tmp_path_factory.mktemp("template") / "program"
    init_program(root, git=False)
    return root


@pytest.fixture
def world(template, tmp_path, monkeypatch, capsys):
    """A program, and the command line with an engine of one's choice."""
    import shutil

    root = tmp_path / "program"
    shutil.copytree(template, root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HARNESS_ACTOR", "agent:tester")
    monkeypatch.delenv("HARNESS_PROGRAM", raising=False)
    monkeypatch.setitem(ENVIRONMENTS, "riddles", SPEC)
    monkeypatch.setattr(backend, "capture_environment", lambda *_: {"commit": "c"})

    def run(*argv, engine=None):
        solver = engine or Solver()

        def player(program, plan, env):
            sampling = Sampling(**plan.settings["sampling"])
            return Player(solver, Letters(), frozenset([END]), env, "solver", sampling, plan.request.seed)

        monkeypatch.setattr(backend, "_player", player)
        capsys.readouterr()
        code = int(main([*argv, "--json"]))
        return code, json.loads(capsys.readouterr().out), solver

    run.program = Program(root)
    return run


def plain(result):
    return {key: value for key, value in result.items() if key != "spent"} | {
        "spent": {key: value for key, value in result["spent"].items() if key != "seconds"}
    }


def test_a_search_leaves_a_prompt_and_a_run_of_its_own_kind(world):
    code, document, solver = world(*SEARCH)
    assert code == 0, document
    result, program = document["detail"]["result"], world.program
    assert document["target"] == "run-001" and result["spent"]["evaluations"] <= 160 < solver.played
    run = Ledger(program.ledger).state().runs["run-001"]
    assert (run.kind, run.status, run.created["search"]["number"]) == ("prompt_search", "completed", 1)
    assert run.hypothesis and [event.kind for event in run.events] == ["created", "started", "finished"]
    path = program.prompt_path("riddles", result["prompt"])
    file = tomllib.loads(path.read_text())
    assert read_prompt(program, "riddles", result["prompt"]) == file["components"]
    assert file["source"] == "run-001" and file["search"]["prompt_sha"] == result["prompt_sha"]
    assert (
        file["search"]["validation"]["found"]["reward"]["low"]
        <= file["search"]["validation"]["found"]["reward"]["mean"]
    )
    assert file["search"]["spent"]["evaluations"] == result["spent"]["evaluations"]
    assert not [finding for finding in check(program.ledger, root=program.root).findings if finding.severity == "error"]
    path.write_text(path.read_text().replace("run-001", "run-009"))
    damaged = check(program.ledger, root=program.root).findings
    assert [finding.kind for finding in damaged if finding.severity == "error"] == ["changed_file"]


def test_a_run_with_the_found_prompt_does_not_train_on_what_it_shows(world):
    _, document, _ = world(*SEARCH)
    program, result = world.program, document["detail"]["result"]
    section = EnvSection(id="riddles", prompt=result["prompt"])
    config = RunConfig(hypothesis="h", env=(section,))
    shown = shown_tasks(program, config)["riddles"]
    assert len(shown) == result["demonstrations"] > 0
    trained = _training_env(section, config, {"riddles": None}, shown)
    stream = {trained.stream[position].id for position in range(3000)}
    everything = {task.id: task for task in trained.env.tasks("train")}
    clusters = {everything[task].cluster for task in shown}
    assert not shown & stream and not clusters & {everything[task].cluster for task in stream}
    assert stream == {task.id for task in everything.values() if task.cluster not in clusters}
    assert shown_tasks(program, RunConfig(hypothesis="h", env=(EnvSection(id="riddles"),))) == {"riddles": frozenset()}


def test_the_same_command_shows_a_finished_search_and_another_needs_a_reason(world):
    _, first, _ = world(*SEARCH)
    code, again, solver = world(*SEARCH)
    assert (code, solver.played, again["applied"]) == (0, 0, False)
    assert again["detail"]["result"] == first["detail"]["result"]
    code, refused, solver = world(*SEARCH, "--seed", "1")
    assert (code, refused["error"]["kind"], solver.played) == (2, "refused", 0)
    code, second, _ = world(*SEARCH, "--seed", "1", "--reason", "is it the seed?")
    assert code == 0 and second["target"] == "run-002"
    created = Ledger(world.program.ledger).state().runs["run-002"].created
    assert created["search"]["number"] == 2 and created["search"]["reason"] == "is it the seed?"
    assert world("decide", "run-002", "reject", "--reason", "as good as the first")[0] == 0


@pytest.mark.parametrize("call", [2, 5])
def test_after_a_signal_the_same_command_goes_on(world, template, tmp_path, call):
    _, whole, everything = world(*SEARCH)
    program = world.program
    for path in (program.ledger, program.prompt_path("riddles", whole["detail"]["result"]["prompt"])):
        path.unlink()
    for path in program.run_dir("run-001").glob("evaluations.*"):
        path.unlink()
    code, _, killed = world(*SEARCH, engine=Solver(before=[call]))
    assert code == 130
    code, resumed, rest = world(*SEARCH)
    assert code == 0 and killed.played + rest.played == everything.played
    assert plain(resumed["detail"]["result"]) == plain(whole["detail"]["result"])
    attempts = Ledger(program.ledger).state().runs["run-001"].attempts
    assert [attempt["outcome"] for attempt in attempts] == ["interrupted", "completed"]


def test_an_attempt_without_an_end_is_closed_by_the_next_one(world, monkeypatch):
    ledger = Ledger(world.program.ledger)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "append", lambda *_, **__: pytest.fail("a killed process writes nothing more"))
        with pytest.raises(pytest.fail.Exception):
            world(*SEARCH)
    gone = this_process() | {"pid": 2**22 + 1}
    ledger.append("run-001", "started", {"attempt": 1, **gone})
    code, _, _ = world(*SEARCH)
    attempts = ledger.state().runs["run-001"].attempts
    assert code == 0 and [attempt["outcome"] for attempt in attempts] == ["crashed", "completed"]


def test_what_is_refused_leaves_no_trace(world):
    for argv, kind in (
        (("search-prompt", "riddles", "--budget", "20"), "usage"),
        (("search-prompt", "riddels"), "not_found"),
        ((*SEARCH, "--around", "run-004"), "not_found"),
        ((*SEARCH, "--seed-prompt", "nobody"), "not_found"),
        ((*SEARCH, "--reflection", "no-such-model-anywhere"), None),
    ):
        code, document, solver = world(*argv)
        assert code == 2 and solver.played == 0, document
        assert kind in (None, document["error"]["kind"])
    assert not world.program.ledger.exists() or set(Ledger(world.program.ledger).state().runs) <= {"run-001"}


def test_a_search_around_a_trained_run_needs_a_reason(world):
    Ledger(world.program.ledger).append("run-001", "created", {"type": "training", "hypothesis": "h"})
    code, document, _ = world(*SEARCH, "--around", "run-001")
    assert (code, document["error"]["kind"]) == (2, "refused")
    assert "before RL" in document["error"]["message"]
    code, document, _ = world(*SEARCH, "--around", "run-001", "--reason", "the prompt was absorbed", "--dry-run")
    assert code == 0 and document["detail"]["settings"]["around"] == "run-001"


def test_a_dry_run_touches_nothing_and_a_file_can_be_the_seed(world, tmp_path):
    own = tmp_path / "mine.toml"
    own.write_text('[components]\nsystem = "Please."\n')
    code, document, solver = world(*SEARCH, "--seed-prompt", str(own), "--dry-run")
    assert code == 0 and document["dry_run"] and solver.played == 0
    assert document["detail"]["settings"]["seed_prompt"] == "mine.toml"
    assert str(tmp_path) not in json.dumps(document["detail"])
    assert not world.program.ledger.exists()
    code, document, _ = world(*SEARCH, "--seed-prompt", str(own))
    history = json.loads((world.program.analysis_dir("run-001") / "data/search.json").read_text())["history"]
    assert code == 0 and history[0]["components"]["system"] == "Please."


def test_a_reflection_model_behind_an_endpoint_and_its_key_stay_apart(world, monkeypatch):
    asked = ("search-prompt", "riddles", "--budget", "160", "--reflection", "reflector-1")
    monkeypatch.setenv("REFLECTION_KEY", KEY)
    with serving(status(500, KEY), streamed(f"```\nSolve it well. {KEY}\n```")) as server:
        named = ("--reflection-url", server.url, "--reflection-key-env", "REFLECTION_KEY")
        monkeypatch.setattr("harness.prompt_search.endpoint.BACKOFF_S", 0.0)
        code, document, _ = world(*asked, *named, "--max-money", "5", "--price-in", "3", "--price-out", "15")
        assert code == 0, document
        requests = len(server.requests)
        again = world(*asked, *named, "--max-money", "5", "--price-in", "3", "--price-out", "15")
        assert again[0] == 0 and len(server.requests) == requests > 1
    result = document["detail"]["result"]
    assert result["reflection"] == "reflector-1" and 0 < result["spent"]["money"] <= 5
    assert {headers["Authorization"] for _, headers, _ in server.requests} == {f"Bearer {KEY}"}
    root = world.program.root
    assert world("report", "run-001")[0] == 0 and world("report", "--check")[0] == 0
    holders = [path for path in root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert holders == []


def test_an_endpoint_that_refuses_the_key_fails_at_once_and_says_which_variable(world, monkeypatch):
    monkeypatch.setenv("REFLECTION_KEY", KEY)
    asked = ("search-prompt", "riddles", "--budget", "160", "--reflection", "m", "--reflection-key-env")
    with serving(status(401, f"no: {KEY}")) as server:
        code, document, _ = world(*asked, "REFLECTION_KEY", "--reflection-url", server.url)
    assert code == 2 and len(server.requests) == 1
    assert "REFLECTION_KEY" in document["error"]["hint"] and KEY not in json.dumps(document)
    assert KEY not in world.program.ledger.read_text()
    code, document, _ = world(*asked, "REFLECTION_KEY")
    assert code == 2 and "--reflection-url" in document["error"]["hint"]


def test_the_report_of_a_search_is_made_from_its_record(world):
    _, document, _ = world(*SEARCH)
    assert world("report", "run-001")[0] == 0
    page = (world.program.analysis_dir("run-001") / "report.md").read_text()
    result = document["detail"]["result"]
    assert result["prompt"] in page and "Candidate tree" in page and "the ledger names" not in page
    mean = f"{result['scoring']['gain']['seed']['reward']['mean']:+.3f}".replace("-", "−")
    assert mean in page
