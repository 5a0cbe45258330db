"""Programs for the planning tests, copied from one template, and task hashes read once."""

import shutil

import pytest

from harness.backends import basis
from harness.program import Program, init_program

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
