"""Branches that both add to the ledger, merged by git in every way there is."""

from __future__ import annotations

import shutil

import pytest

from harness.ledger.events import parse_line
from harness.ledger.fold import fold
from harness.program.gitsetup import install, setup_of
from tests.ledger.git_program import Repository, summary


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Repository:
    """A program in which main and a branch `work` each made a run of their own after run-001."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_ACTOR", "agent:tester")
        repository = Repository.init(tmp_path_factory.mktemp("origin"))
        repository.make_run("run-001", "first")
        repository.commit("run-001")
        repository.branch("work")
        repository.make_run("run-002", "second", parent="run-001")
        repository.note("run-001", "from work")
        repository.commit("run-002")
        repository.git("checkout", "-q", "main")
        repository.make_run("run-003", "third", parent="run-001")
        repository.note("run-001", "from main")
        repository.commit("run-003")
    return repository


@pytest.fixture
def repository(origin, tmp_path) -> Repository:
    shutil.copytree(origin.root, tmp_path / "program", symlinks=True)
    return Repository(tmp_path / "program", origin.path)


@pytest.fixture(scope="module")
def expected(origin) -> dict[str, list[str]]:
    """What every way of merging must come to."""
    lines = [origin.git("show", f"{branch}:runs.jsonl").stdout for branch in ("main", "work")]
    return summary(fold(parse_line(line.encode()) for text in lines for line in text.splitlines()))


def test_both_directions_merge_by_themselves_to_the_same_bytes(repository, expected) -> None:
    repository.git("merge", "-q", "--no-edit", "work")
    one = (repository.root / "runs.jsonl").read_bytes()
    assert repository.errors("main~1") == [] and summary(repository.state()) == expected
    repository.git("checkout", "-q", "work")
    repository.git("merge", "-q", "--no-edit", "main~1")
    assert (repository.root / "runs.jsonl").read_bytes() == one
    assert [note["text"] for note in repository.state().runs["run-001"].notes] == ["from work", "from main"]
    assert [finding.kind for finding in repository.findings()] == ["fork"]


def test_the_head_after_a_fork_follows_both_sides(repository) -> None:
    repository.git("merge", "-q", "--no-edit", "work")
    before = {event.sha for event in repository.state().runs["run-001"].events if event.kind == "noted"}
    event = repository.ledger.append("run-001", "noted", {"text": "after"})
    assert set(event.prev) == before
    assert repository.errors() == []


@pytest.mark.parametrize("driver", [True, False])
def test_merge_union(repository, expected, driver) -> None:
    """Trap 1: lines come in the order of the sides, and a driver of that name needs no harness."""
    attributes = repository.root / ".git/info/attributes"
    attributes.parent.mkdir(exist_ok=True)
    attributes.write_text("runs.jsonl merge=union\n")
    if not driver:
        repository.without_driver()
    repository.git("merge", "-q", "--no-edit", "work")
    assert repository.errors("work") == [] and summary(repository.state()) == expected


def test_cherry_pick_then_merge(repository, expected) -> None:
    """Trap 5: the same lines arrive twice."""
    repository.git("cherry-pick", "work")
    repository.git("merge", "-q", "--no-edit", "work")
    assert repository.errors("work") == [] and summary(repository.state()) == expected


def test_cherry_pick_then_union_leaves_repeated_lines_that_count_once(repository, expected) -> None:
    lines = (repository.root / "runs.jsonl").read_bytes().splitlines(keepends=True)
    work = repository.git("show", "work:runs.jsonl").stdout.encode().splitlines(keepends=True)
    (repository.root / "runs.jsonl").write_bytes(b"".join([*lines, *work]))
    for name in ("rl", "analysis"):
        repository.git("checkout", "work", "--", f"{name}/")
    assert {finding.kind for finding in repository.findings("work")} == {"repeated", "fork"}
    assert summary(repository.state()) == expected


def test_rebase(repository, expected) -> None:
    repository.git("checkout", "-q", "work")
    repository.git("rebase", "-q", "main")
    assert repository.errors("main") == [] and summary(repository.state()) == expected


def test_squash(repository, expected) -> None:
    repository.git("merge", "--squash", "work")
    repository.commit("squashed")
    assert repository.errors("main~1") == [] and summary(repository.state()) == expected


def test_githubs_button_after_the_base_was_merged_locally(repository, expected) -> None:
    """Trap 7: GitHub knows no drivers; the text merge works once the branch has the base's lines."""
    repository.git("checkout", "-q", "work")
    repository.git("merge", "-q", "--no-edit", "main")
    repository.git("checkout", "-q", "main")
    repository.without_driver()
    repository.git("merge", "-q", "--no-ff", "--no-edit", "work")
    assert repository.errors("work") == [] and summary(repository.state()) == expected


def test_without_the_driver_git_leaves_markers_and_the_way_out_works(repository, expected) -> None:
    """Trap 6: a clone that was never set up."""
    repository.without_driver()
    assert repository.git("merge", "--no-edit", "work", check=False).returncode != 0
    findings = [finding for finding in repository.findings() if finding.kind == "damage"]
    assert len(findings) == 3 and "harness ledger install" in findings[0].message
    assert setup_of(repository.root).commands
    assert install(repository.root).commands and setup_of(repository.root).complete
    repository.git("checkout", "-m", "--", "runs.jsonl")
    repository.commit("merged")
    assert repository.errors("work") == [] and summary(repository.state()) == expected


def test_an_edited_event_is_a_conflict_that_leaves_ours_alone(repository) -> None:
    """Trap 2: an edit on one side must not be kept beside the original."""
    ours = (repository.root / "runs.jsonl").read_bytes()
    repository.git("checkout", "-q", "work")
    path = repository.root / "runs.jsonl"
    path.write_bytes(path.read_bytes().replace(b"from work", b"from wirk"))
    repository.commit("edited")
    repository.git("checkout", "-q", "main")
    done = repository.git("merge", "--no-edit", "work", check=False)
    assert done.returncode != 0 and "hash does not match" in done.stdout + done.stderr
    assert path.read_bytes() == ours
    assert "UU runs.jsonl" in repository.git("status", "--porcelain").stdout


def test_a_deleted_event_comes_back(repository, expected) -> None:
    """Trap 3: git takes a deletion silently."""
    repository.git("checkout", "-q", "work")
    path = repository.root / "runs.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(line for line in whole.splitlines(keepends=True) if b'"run-001","kind":"fin' not in line))
    assert "lost_event" in repository.errors("work") and "lost_event" in repository.errors("HEAD")
    repository.commit("lossy")
    repository.git("checkout", "-q", "main")
    done = repository.git("merge", "--no-edit", "work")
    assert "events that theirs had dropped are kept: 1" in done.stdout + done.stderr
    assert repository.errors("main~1") == [] and summary(repository.state()) == expected


def test_a_torn_tail_is_not_merged_into_the_middle(repository) -> None:
    """Trap 4."""
    repository.git("checkout", "-q", "work")
    path = repository.root / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert "torn" in repository.errors()
    repository.commit("torn")
    repository.git("checkout", "-q", "main")
    done = repository.git("merge", "--no-edit", "work", check=False)
    assert done.returncode != 0 and "is torn" in done.stdout + done.stderr
    assert repository.errors("main") == []


def test_a_driver_that_cannot_start_is_a_conflict(repository) -> None:
    repository.git("config", "merge.harness-ledger.driver", "no-such-command %O %A %B")
    assert repository.git("merge", "--no-edit", "work", check=False).returncode != 0
    assert "UU runs.jsonl" in repository.git("status", "--porcelain").stdout


def test_install_is_repeatable_and_adds_attributes(repository) -> None:
    assert install(repository.root).complete
    (repository.root / ".gitattributes").write_text("*.png binary")
    assert install(repository.root, dry_run=True).attributes
    assert (repository.root / ".gitattributes").read_text() == "*.png binary"
    install(repository.root)
    assert (repository.root / ".gitattributes").read_text().startswith("*.png binary\nruns.jsonl diff=")
    assert setup_of(repository.root).complete
