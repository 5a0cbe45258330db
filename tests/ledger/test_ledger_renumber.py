"""Two branches that took one number: before, in the middle of and after their merge."""

from __future__ import annotations

import contextlib
import shutil

import pytest

from harness.core import files
from harness.core.errors import CannotTellError, NotFoundError, RefusedError, UsageError
from harness.ledger import this_process
from harness.program import relocate, renumber
from tests.ledger.git_program import Repository


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Repository:
    """A program in which main and `work` each made a run-002; the one on `work` is younger and has a child."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_ACTOR", "agent:tester")
        repository = Repository.init(tmp_path_factory.mktemp("origin"))
        repository.make_run("run-001", "first")
        repository.commit("run-001")
        repository.make_run("run-002", "theirs", parent="run-001")
        repository.commit("theirs")
        repository.branch("work", "main~1")
        repository.make_run("run-002", "ours", parent="run-001")
        repository.commit("ours")
        repository.make_run("run-003", "child", parent="run-002")
        repository.commit("child")
    return repository


@pytest.fixture
def repository(origin, tmp_path) -> Repository:
    shutil.copytree(origin.root, tmp_path / "program", symlinks=True)
    return Repository(tmp_path / "program", origin.path)


def solve(repository: Repository, run: str = "run-002", **options) -> renumber.Renumbering:
    return renumber.renumber(repository.program, run, **({"base": "main"} | options))


def check_solved(repository: Repository, new: str = "run-004") -> None:
    """Both runs are whole, under their numbers, and the child names its parent."""
    root = repository.root
    state = repository.state()
    assert {name: run.hypothesis for name, run in state.runs.items() if name != "run-001"} == {
        "run-002": "theirs",
        "run-003": "child",
        new: "ours",
    }
    assert not state.collisions and state.former == {"run-002": new}
    assert state.runs["run-003"].parent == new
    assert f'parent = "{new}"' in (root / "rl/run-003.toml").read_text()
    for run, word in (("run-002", "theirs"), (new, "ours")):
        assert (root / f"rl/{run}.toml").read_text().startswith(f"# why: {word}\n")
        names = {path.name for path in (root / f"analysis/{run}").iterdir()}
        assert names == {"evals", "report.md", f"{word}.txt"}
    assert "<<<" not in (root / "analysis/run-002/report.md").read_text()
    assert repository.errors() == []


def test_before_the_merge(repository) -> None:
    """The way it should go: the branch makes room, then everything merges by itself."""
    done = solve(repository)
    assert (done.base, done.moves, done.notes) == ("main", [("run-002", "run-004")], [])
    assert not (repository.root / "rl/run-002.toml").exists() and not (repository.root / "analysis/run-002").exists()
    assert repository.errors() == []
    repository.commit("renumbered")
    repository.git("merge", "-q", "--no-edit", "main")
    check_solved(repository)
    assert repository.errors("main") == []


def test_githubs_button_after_the_branch_made_room(repository) -> None:
    solve(repository)
    repository.commit("renumbered")
    repository.git("merge", "-q", "--no-edit", "main")
    repository.git("checkout", "-q", "main")
    repository.git("config", "--remove-section", "merge.harness-ledger")
    repository.git("merge", "-q", "--no-ff", "--no-edit", "work")
    check_solved(repository)


def test_in_the_middle_of_the_merge(repository) -> None:
    done = repository.git("merge", "--no-edit", "main", check=False)
    assert done.returncode != 0 and "harness ledger renumber run-002" in done.stdout + done.stderr
    assert repository.errors() == ["run_collision"]
    assert solve(repository).moves == [("run-002", "run-004")]
    check_solved(repository)
    repository.commit("merged")
    check_solved(repository)
    assert repository.errors("main") == []


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_after_a_merge_that_kept_one_sides_files(repository, side) -> None:
    repository.git("merge", "--no-edit", "main", check=False)
    repository.git("checkout", f"--{side}", "--", "rl", "analysis")
    repository.commit("merged badly")
    assert "run_collision" in repository.errors()
    solve(repository)
    check_solved(repository)


def test_in_the_middle_of_a_rebase(repository) -> None:
    done = repository.git("rebase", "main", check=False)
    assert done.returncode != 0
    solve(repository)
    repository.git("add", "-A")
    done = repository.git("rebase", "--continue", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run-003" in repository.state().runs
    solve(repository)  # the child came later and names its parent by the old number
    check_solved(repository)


def test_later_events_of_both_runs_survive_another_merge(repository) -> None:
    repository.branch("unaware", "work")
    repository.note("run-002", "from one who does not know")
    repository.commit("note")
    repository.git("checkout", "-q", "work")
    solve(repository)
    repository.note("run-004", "knows")
    repository.commit("renumbered")
    repository.git("merge", "-q", "--no-edit", "main")
    repository.git("merge", "-q", "--no-edit", "unaware")
    check_solved(repository)
    state = repository.state()
    assert {note["text"] for note in state.runs["run-004"].notes} == {"knows", "from one who does not know"}
    assert not state.runs["run-002"].notes
    repository.note("run-004", "after")
    repository.note("run-002", "after")
    assert repository.errors("main") == [] and len(repository.state().runs["run-004"].notes) == 3


@pytest.mark.parametrize("merged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_at_every_step_is_finished_by_running_it_again(repository, monkeypatch, merged) -> None:
    if merged:
        repository.git("merge", "--no-edit", "main", check=False)
    else:
        repository.note("run-003", "so that there is something to commit later")
    start = repository.root.with_name("start")
    shutil.copytree(repository.root, start, symlinks=True)
    (repository.root / "outputs/run-002").mkdir(parents=True)
    steps = 0
    while True:
        if steps:
            shutil.rmtree(repository.root)
            shutil.copytree(start, repository.root, symlinks=True)
        with monkeypatch.context() as patch:
            killer = _Killer(patch, steps)
            with contextlib.suppress(_Killed):
                solve(repository)
        done = solve(repository)
        assert not done.moves if killer.steps > 1 else True
        if merged:
            check_solved(repository)
        else:
            assert repository.errors() == [] and set(repository.state().runs) == {"run-001", "run-003", "run-004"}
        if killer.steps <= steps:
            break
        steps += 1
    assert steps >= 4
    assert solve(repository).files == []


class _Killed(BaseException):
    """What stops a process in the middle; nothing may catch it."""


class _Killer:
    """Stop before the n-th step that changes a file of the program."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int) -> None:
        self.steps = 0
        self.last = last
        self._wrap(patch, relocate, "atomic_write", files.atomic_write)
        self._wrap(patch, relocate, "_move", relocate._move)
        self._wrap(patch, relocate.os, "rename", relocate.os.rename)

    def _wrap(self, patch, module, name, function) -> None:
        def act(*arguments):
            self.steps += 1
            if self.steps > self.last:
                raise _Killed
            return function(*arguments)

        patch.setattr(module, name, act)


def test_outputs_go_with_their_run(repository) -> None:
    outputs = repository.root / "outputs/run-002"
    outputs.mkdir(parents=True)
    (outputs / "metrics.jsonl").write_text("{}\n")
    solve(repository)
    assert (repository.root / "outputs/run-004/metrics.jsonl").is_file() and not outputs.exists()


def test_a_dry_run_touches_nothing(repository) -> None:
    before = repository.git("status", "--porcelain").stdout
    ledger = (repository.root / "runs.jsonl").read_bytes()
    done = solve(repository, dry_run=True)
    assert done.moves == [("run-002", "run-004")] and not done.files
    assert repository.git("status", "--porcelain").stdout == before
    assert (repository.root / "runs.jsonl").read_bytes() == ledger


def test_the_number_can_be_chosen(repository) -> None:
    with pytest.raises(UsageError, match="taken"):
        solve(repository, to="run-003")
    with pytest.raises(UsageError, match="not a run id"):
        solve(repository, to="run-9")
    assert solve(repository, to="run-020").moves == [("run-002", "run-020")]
    repository.commit("renumbered")
    repository.git("merge", "-q", "--no-edit", "main")
    check_solved(repository, "run-020")


def test_what_is_refused(repository) -> None:
    with pytest.raises(RefusedError, match="collides with no other"):
        solve(repository, "run-001")
    with pytest.raises(NotFoundError):
        solve(repository, "run-077")
    with pytest.raises(CannotTellError):
        solve(repository, base="origin/nowhere")
    for name in ("--upload-pack=x", ""):
        with pytest.raises((UsageError, RefusedError)):
            solve(repository, base=name)


def test_events_in_the_base_are_refused(repository) -> None:
    repository.git("merge", "--no-edit", "main", check=False)
    repository.git("checkout", "--ours", "--", "rl", "analysis")
    repository.commit("merged")
    repository.git("checkout", "-q", "-B", "main")
    before = (repository.root / "runs.jsonl").read_bytes()
    with pytest.raises(RefusedError, match="in main already") as caught:
        solve(repository)
    assert "--base COMMIT" in caught.value.hint
    assert (repository.root / "runs.jsonl").read_bytes() == before
    assert solve(repository, base="main^2").moves == [("run-002", "run-004")]
    check_solved(repository)


def test_a_running_run_is_refused(repository) -> None:
    repository.ledger.append("run-002", "started", {"attempt": 2} | this_process())
    with pytest.raises(RefusedError, match="is running"):
        solve(repository)


def test_without_a_base_the_older_run_keeps_the_number(repository) -> None:
    repository.git("merge", "--no-edit", "main", check=False)
    done = solve(repository, base=None)
    assert done.base is None and done.moves == [("run-002", "run-004")]
    check_solved(repository)


def test_a_child_from_before_links_is_listed_in_the_event(repository) -> None:
    repository.make_run("run-009", "old child", parent="run-002", links=False)
    solve(repository)
    state = repository.state()
    assert state.runs["run-009"].parent == "run-010"
    repository.commit("renumbered")
    repository.git("merge", "-q", "--no-edit", "main")
    assert repository.state().runs["run-009"].parent == "run-010" and repository.errors() == []
