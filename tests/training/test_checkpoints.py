"""Checkpoints and metrics rows: what a resume finds after any crash."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import OptimizerSection  # noqa: E402
from harness.core.canonical import sha256_file, strict_loads  # noqa: E402
from harness.core.errors import ConfigError, InfraError  # noqa: E402
from harness.core.types import (  # noqa: E402
    Completion,
    Episode,
    FailureClass,
    FinishReason,
    Message,
    Rollout,
    Score,
    Task,
    failed_score,
)
from harness.training.checkpoints import (  # noqa: E402
    Numerics,
    Progress,
    checkpoint_steps,
    load_checkpoint,
    save_checkpoint,
)
from harness.training.grouping import make_group  # noqa: E402
from harness.training.metrics import append_row, rollout_metrics  # noqa: E402
from harness.training.optimizer import build_optimizer  # noqa: E402

NUMERICS = Numerics(1, "AVX2", "cpu", "torch.float32", "2")


def learner(seed=0):
    torch.manual_seed(seed)
    parameters = {name: torch.nn.Parameter(torch.randn(3, 2)) for name in ("a", "b")}
    return parameters, build_optimizer(parameters.values(), OptimizerSection(learning_rate=0.1))


def learn(parameters, optimizer, steps):
    for step in steps:
        for index, parameter in enumerate(parameters.values()):
            generator = torch.Generator().manual_seed(100 * step + index)
            parameter.grad = torch.randn(3, 2, generator=generator)
        optimizer.step()


def save(folder, step, parameters, optimizer, keep=2, numerics=NUMERICS, sha="c"):
    save_checkpoint(folder, Progress(step, 10 * step, 1), parameters, optimizer, numerics, sha, keep)


def test_training_goes_on_bit_for_bit(tmp_path):
    parameters, optimizer = learner()
    learn(parameters, optimizer, range(5))
    save(tmp_path, 5, parameters, optimizer)
    learn(parameters, optimizer, range(5, 9))
    resumed, other = learner(seed=7)
    progress = load_checkpoint(tmp_path, 5, resumed, other, NUMERICS, "c")
    assert progress == Progress(5, 50, 1)
    learn(resumed, other, range(5, 9))
    assert all(torch.equal(parameters[name], resumed[name]) for name in parameters)


def test_the_newest_are_kept_by_number(tmp_path):
    parameters, optimizer = learner()
    for step in (2, 9, 10, 11):
        save(tmp_path, step, parameters, optimizer)
    assert checkpoint_steps(tmp_path) == [10, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]
    save(tmp_path, 100, parameters, optimizer, keep=1)
    assert checkpoint_steps(tmp_path) == [100]


def test_what_is_not_whole_is_not_a_checkpoint(tmp_path):
    parameters, optimizer = learner()
    save(tmp_path, 3, parameters, optimizer)
    (tmp_path / ".step_4.partial").mkdir()
    (tmp_path / ".step_4.partial" / "manifest.json").write_text("{}")
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "state.safetensors").write_bytes(b"half")
    (tmp_path / "step_3.bak").mkdir()
    (tmp_path / "step_3.bak" / "manifest.json").write_text("{}")
    assert checkpoint_steps(tmp_path) == [3]
    assert checkpoint_steps(tmp_path / "absent") == []


def test_the_manifest_is_written_last(tmp_path, monkeypatch):
    """At the moment the tensors are written there is no manifest, and no folder of the final name."""
    from harness.training import checkpoints

    seen = []
    real = checkpoints.save_file

    def spy(tensors, path):
        seen.append(sorted(p.name for p in tmp_path.rglob("*")))
        real(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", spy)
    save(tmp_path, 1, *learner())
    assert seen == [[".step_1.partial"]]
    assert sorted(p.name for p in (tmp_path / "step_1").iterdir()) == ["manifest.json", "state.safetensors"]


def test_a_failed_write_leaves_the_earlier_ones(tmp_path, monkeypatch):
    from harness.training import checkpoints

    parameters, optimizer = learner()
    save(tmp_path, 1, parameters, optimizer)
    for error in (OSError(28, "No space left on device"), checkpoints.SafetensorError("I/O error: disk full")):

        def fail(tensors, path, error=error):
            raise error

        monkeypatch.setattr(checkpoints, "save_file", fail)
        with pytest.raises(InfraError, match="cannot write the checkpoint"):
            save(tmp_path, 2, parameters, optimizer, keep=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1"]


@pytest.mark.parametrize("change", ["tensors", "manifest", "list", "gone"])
def test_damage_is_named_with_the_folder(tmp_path, change):
    parameters, optimizer = learner()
    save(tmp_path, 1, parameters, optimizer)
    folder = tmp_path / "step_1"
    if change == "tensors":
        data = bytearray((folder / "state.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "state.safetensors").write_bytes(bytes(data))
    elif change == "gone":
        (folder / "state.safetensors").unlink()
    else:
        (folder / "manifest.json").write_text("{" if change == "manifest" else "[]")
    with pytest.raises(InfraError, match="is damaged") as caught:
        load_checkpoint(tmp_path, 1, parameters, optimizer, NUMERICS, "c")
    assert f"delete {folder}" in caught.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [("threads", 2), ("capability", "AVX512"), ("device", "cuda"), ("dtype", "torch.bfloat16"), ("torch_version", "3")],
)
def test_other_numerics_are_refused_and_named(tmp_path, field, value):
    from dataclasses import asdict, replace

    parameters, optimizer = learner()
    save(tmp_path, 1, parameters, optimizer)
    with pytest.raises(ConfigError, match=rf"{field} {asdict(NUMERICS)[field]} → {value}"):
        load_checkpoint(tmp_path, 1, parameters, optimizer, replace(NUMERICS, **{field: value}), "c")
    with pytest.raises(ConfigError, match="config changed"):
        load_checkpoint(tmp_path, 1, parameters, optimizer, NUMERICS, "another")


def test_rows_after_a_torn_line_stay_whole(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    append_row(path, {"step": 1, "x": 0.5})
    with path.open("ab") as file:
        file.write(b'{"step":2,"x":0.')
    append_row(path, {"step": 2, "x": math.nan})
    lines = path.read_bytes().split(b"\n")
    assert strict_loads(lines[0]) == {"step": 1, "x": 0.5}
    with pytest.raises(ValueError):
        strict_loads(lines[1])
    assert strict_loads(lines[2]) == {"step": 2, "x": {"$non_finite": "nan"}}
    assert lines[3:] == [b""]


def test_a_row_that_does_not_fit_is_taken_back(tmp_path, monkeypatch):
    from harness.training import metrics

    path = tmp_path / "metrics.jsonl"
    append_row(path, {"step": 1})
    before = path.read_bytes()
    real = metrics.os.write
    monkeypatch.setattr(metrics.os, "write", lambda descriptor, data: real(descriptor, data[:5]))
    with pytest.raises(InfraError, match="No space left") as caught:
        append_row(path, {"step": 2})
    assert "free some disk space" in caught.value.hint
    monkeypatch.undo()
    assert path.read_bytes() == before


def rollout(index, score, tokens, finish=FinishReason.STOP):
    task = Task("t", "toy", "train", {}, "A", "A", "c")
    completion = Completion(tuple(range(tokens)), (-1.0,) * tokens, finish)
    episode = Episode("t", (Message("user", "q"), Message("assistant", "a")), finish)
    return Rollout(task, "t", index, (1, 2), (completion.segment,), episode, score)


def test_a_group_whose_only_spread_is_masked_counts_as_one_without():
    part = [
        rollout(0, Score(1.0, {"accuracy": 1.0}), 4),
        rollout(1, Score(1.0, {"accuracy": 1.0}), 5),
        rollout(2, Score(0.0, {"accuracy": 0.0}), 10, FinishReason.LENGTH),
    ]
    shares = [
        rollout_metrics({"toy": [make_group(part, "mean", masked, 1.0)]})["train/zero_spread_share"]
        for masked in (False, True)
    ]
    assert shares == [0.0, 1.0]


def test_metrics_of_a_step_by_hand():
    parts = [
        [
            rollout(0, Score(1.0, {"accuracy": 1.0}), 4),
            rollout(1, Score(0.0, {"accuracy": 0.0}, failure=FailureClass.MODEL), 10, FinishReason.LENGTH),
        ],
        [
            rollout(2, Score(0.5, {"accuracy": 0.5}), 6),
            rollout(3, failed_score(FailureClass.VERIFIER, "bug"), 8),
        ],
    ]
    metrics = rollout_metrics({"toy": [make_group(part, "mean", False, 1.0) for part in parts]})
    assert metrics["train/toy/reward/mean"] == 0.5  # the failed verifier is in no mean
    assert metrics["train/toy/reward/std"] == pytest.approx(math.sqrt(0.5 / 3))
    assert metrics["train/toy/component/accuracy"] == 0.5
    assert metrics["train/group_spread"] == 0.25  # 0.5 and 0
    assert metrics["train/zero_spread_share"] == 0.5
    assert [metrics[f"train/tokens/{k}"] for k in ("mean", "min", "max")] == [7.0, 4.0, 10.0]
    assert metrics["train/truncated_share"] == 0.25
    assert {k: v for k, v in metrics.items() if "failures" in k} == {
        "train/failures/model": 1.0,
        "train/failures/verifier": 1.0,
    }


def test_failed_and_masked_rollouts_stay_outside_the_baseline():
    rollouts = [
        rollout(0, Score(1.0, {}), 4),
        rollout(1, Score(0.0, {}, failure=FailureClass.MODEL), 4),
        rollout(2, failed_score(FailureClass.INFRA, "engine"), 4),
        rollout(3, Score(0.2, {}), 9, FinishReason.LENGTH),
    ]
    assert make_group(rollouts[:3], "mean", False, 0.7).advantages == (0.5, -0.5, 0.0)
    masked = make_group(rollouts, "mean", True, 0.7)
    assert masked.advantages == (0.5, -0.5, 0.0, 0.0)
    assert masked.temperature == 0.7
    assert make_group(rollouts, "mean", False, 0.7).advantages == pytest.approx((0.6, -0.4, 0.0, -0.2))


def test_manifest_is_readable(tmp_path):
    save(tmp_path, 4, *learner())
    manifest = json.loads((tmp_path / "step_4" / "manifest.json").read_text())
    assert manifest["progress"] == {"step": 4, "tokens": 40, "empty_steps": 1, "pass_rates": {}}
    assert manifest["numerics"]["threads"] == 1


def rewrite(folder, change):
    """Change a checkpoint's tensors and make its checksum right again."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "state.safetensors")
    change(state)
    save_file(state, folder / "state.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state_sha"] = sha256_file(folder / "state.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update({"parameter/a": torch.zeros(2, 3)}), "does not fit the run: parameter/a"),
        (lambda state: state.update({"parameter/z": torch.zeros(3, 2)}), "does not fit the run: parameter/z"),
        (lambda state: state.update({"optimizer/exp_avg/a": torch.zeros(2, 3)}), "does not fit the run: optimizer"),
        (lambda state: state.pop("parameter/b"), "parameter/b is missing"),
        (lambda state: state["parameter/b"].fill_(math.nan), "non-finite"),
    ],
)
def test_a_foreign_checkpoint_is_refused_and_nothing_is_restored(tmp_path, change, words):
    parameters, optimizer = learner()
    learn(parameters, optimizer, range(2))
    save(tmp_path, 1, parameters, optimizer)
    rewrite(tmp_path / "step_1", change)
    fresh, other = learner(seed=1)
    before = fresh["a"].clone()
    with pytest.raises(InfraError, match=words) as caught:
        load_checkpoint(tmp_path, 1, fresh, other, NUMERICS, "c")
    assert caught.value.hint
    assert torch.equal(fresh["a"], before)


@pytest.mark.parametrize("member", ["progress", "numerics"])
def test_a_manifest_without_a_member_is_damaged(tmp_path, member):
    parameters, optimizer = learner()
    save(tmp_path, 1, parameters, optimizer)
    path = tmp_path / "step_1/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest[member]
    path.write_text(json.dumps(manifest))
    with pytest.raises(InfraError, match="is damaged"):
        load_checkpoint(tmp_path, 1, parameters, optimizer, NUMERICS, "c")
