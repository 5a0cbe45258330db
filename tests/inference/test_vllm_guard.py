"""What a killed process had started is ended by the guard; without vLLM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.inference.vllm_guard import Guard, lives

ROOT = Path(__file__).parents[2]
PARENT = """
import subprocess, sys, time
from harness.inference.vllm_guard import Guard
guard = Guard()
tree = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(300)'])"
child = subprocess.Popen([sys.executable, "-c", tree], start_new_session=True)
time.sleep({pause})
if {told}:
    guard.started()
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("told", [True, False])
def test_what_a_killed_parent_had_started_ends(told):
    """Also before everything was started: loading a model takes minutes."""
    script = PARENT.format(told=told, pause=1 if told else 3)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 3  # the helper and two of the tree
        parent.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=20)[1] == []


def test_the_end_leaves_nothing_and_notices_what_is_gone():
    guard = Guard()
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) for _ in range(2)]
    guard.started()
    assert {process.pid for process in guard.processes} == {child.pid for child in children} and guard.whole()
    children[0].kill()
    deadline = time.monotonic() + 20
    while guard.whole() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not guard.whole() and not lives(psutil.Process(children[0].pid))  # it was not waited for yet
    guard.end(1.0)
    assert not any(map(lives, guard.processes))
    assert guard._helper.returncode == 0
