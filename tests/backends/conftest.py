"""Programs for the planning and launch tests, copied from one template, and task hashes read once."""

import shutil
import time

import pytest

from harness.backends import basis
from harness.program import Program, init_program
from tests.launches import Finished, LaunchServer, copy_program, make_program, save_tiny_model

_real_tasks_sha = basis.tasks_sha
_hashes = {}


@pytest.fixture(scope="session")
def program_template(tmp_path_factory):
    root = tmp_path_factory.mktemp("template") / "prog"
    init_program(root, git=False)
    return root


@pytest.fixture
def empty_program(program_template, tmp_path, monkeypatch):
    """A program without runs; hashing its tasks is done once for all tests, since they do not change."""

    def tasks_sha(env, split):
        key = (env.id, env.args.model_dump_json(), split)
        if key not in _hashes:
            _hashes[key] = _real_tasks_sha(env, split)
        return _hashes[key]

    monkeypatch.setattr(basis, "tasks_sha", tasks_sha)
    # The checkout may move while tests run; what moves is tested with the real functions.
    monkeypatch.setattr(basis, "_last_commit", lambda folder: "c" * 40)
    monkeypatch.setattr(basis, "_tree_sha", lambda folder: "5" * 64)
    shutil.copytree(program_template, tmp_path / "prog")
    return Program(tmp_path / "prog")


@pytest.fixture(scope="session")
def session_server(tmp_path_factory):
    """A process that has imported everything and forks one child per command."""
    pytest.importorskip("torch")
    server = LaunchServer(tmp_path_factory.mktemp("launches"))
    yield server
    server.close()


@pytest.fixture
def launch_server(session_server):
    """The same process; children that a failed test leaves behind do not outlive it."""
    yield session_server
    session_server.kill_leftovers()


@pytest.fixture(scope="session")
def toy_template(session_server):
    """A program with a tiny model and the toy environment; its first run is planned."""
    model = save_tiny_model(session_server.folder / "model")
    return make_program(session_server, session_server.folder / "template", model)


@pytest.fixture
def toy_program(toy_template, tmp_path):
    return copy_program(toy_template, tmp_path / "toy")


@pytest.fixture(scope="session")
def finished(session_server, toy_template):
    """The uninterrupted run: its program, its seconds, and how many times it changed a file."""
    program = copy_program(toy_template, session_server.folder / "finished")
    count = session_server.folder / "writes"
    fault = {"kind": "writes", "root": str(program.root), "count": str(count)}
    began = time.monotonic()
    ended = session_server.launch(program.root, faults=[fault])
    assert ended.code == 0, ended
    return Finished(program, time.monotonic() - began, int(count.read_text()))


@pytest.fixture(scope="session")
def interrupted_template(session_server, toy_template):
    """A run that SIGTERM ended in the middle of step 6; its last checkpoint is of step 4."""
    program = copy_program(toy_template, session_server.folder / "interrupted")
    ended = session_server.launch(program.root, faults=[{"kind": "signal", "name": "SIGTERM", "call": 6}])
    assert ended.code == 143, ended
    return program


@pytest.fixture
def interrupted(interrupted_template, tmp_path):
    return copy_program(interrupted_template, tmp_path / "interrupted")
