"""What can be deleted and made again, what hostile names create, and what a hostile ledger costs."""

import json
import shutil
import subprocess
import sys

import pytest

from harness.ledger import cache
from tests.core.test_ids import EVIL


def seen(cli):
    """Return what the commands that look say, without the time at which they said it."""
    answers = [
        cli(*line, "--json").document for line in (["list"], ["show", "run-001"], ["lineage"], ["status"], ["log"])
    ]
    return [answer | {"as_of": None} for answer in answers]


def test_everything_derived_can_be_deleted_and_comes_back_the_same(cli, program, monkeypatch):
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    (program.run_dir("run-001") / "metrics.jsonl").write_text('{"step": 2, "train/drugprot/reward/mean": 0.5}\n')
    assert cli("report", "run-001").code == 0 and cli("thread").code == 0
    before = seen(cli)
    derived = {path: path.read_bytes() for path in program.analysis_dir("run-001").rglob("*") if path.is_file()}
    thread, ledger = program.thread.read_bytes(), program.ledger.read_bytes()
    assert cache.location(program.ledger).exists() and len(derived) > 4
    cache.location(program.ledger).unlink()
    shutil.rmtree(program.analysis_dir("run-001"))
    program.thread.unlink()
    assert seen(cli)[:3] == [answer | {"report": None} if "report" in answer else answer for answer in before[:3]]
    assert cli("report", "run-001").code == 0 and cli("thread").code == 0
    assert seen(cli) == before
    assert {path: path.read_bytes() for path in derived} == derived
    assert program.ledger.read_bytes() == ledger
    block = thread[thread.index(b"<!-- harness:begin -->") : thread.index(b"<!-- harness:end -->")]
    assert block in program.thread.read_bytes()


NAMED = [
    ["show", "{}"],
    ["report", "{}"],
    ["launch", "{}", "--dry-run"],
    ["rollouts", "{}"],
    ["decide", "{}", "keep", "--reason", "x"],
    ["note", "{}", "text"],
    ["env", "show", "{}"],
    ["new-run", "--from", "{}", "--hypothesis", "h"],
]


@pytest.mark.parametrize("argv", NAMED, ids=lambda argv: argv[0])
def test_evil_names_create_nothing_anywhere(cli, program, tmp_path, tree, argv):
    (tmp_path / "outside").mkdir()
    (program.outputs / "run-777").symlink_to(tmp_path / "outside")
    before = tree(tmp_path)
    for name in [*EVIL, "run-777", "RUN-001", "Run-001"]:
        if "\0" in name or not name:  # no argument of a process can hold or be these
            continue
        code = cli(*[part.format(name) if part == "{}" else part for part in argv]).code
        assert code in (2, 3) or name == "--help", name
    after = tree(tmp_path)
    assert {path for path in after if path not in before} == set()
    assert after == before


HUGE = {
    "one line of 20 MB": lambda line: line[:60] + b"x" * 20_000_000 + b"\n",
    "a line nested 100,000 deep": lambda line: b'{"v":1,"data":' + b"[" * 100_000 + b"\n",
    "a number of a million digits": lambda line: b'{"v":' + b"1" * 1_000_000 + b"}\n",
    "many empty lines": lambda line: b"\n" * 200_000,
}


MEASURED = """
import sys
from harness.cli.main import main
code = main(sys.argv[1:])
for line in open("/proc/self/status"):  # the peak of this process; what getrusage tells includes its parent's
    if line.startswith("VmHWM"):
        print(line.split()[1], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("kind", HUGE)
def test_an_oversized_ledger_line_ends_with_a_code_in_bounded_memory(program, kind):
    data = program.ledger.read_bytes()
    first = data.split(b"\n")[0] + b"\n"
    program.ledger.write_bytes(data + HUGE[kind](first) + first)
    for argv, code in ((["list", "--json"], 6), (["ledger", "verify", "--json"], 1)):
        done = subprocess.run([sys.executable, "-c", MEASURED, *argv], capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stdout[:500] + done.stderr[:500]
        assert len(done.stdout) < 1_000_000 and isinstance(json.loads(done.stdout), dict)
        assert int(done.stderr.split()[-1]) < 200_000  # kilobytes
