"""Memory for a pass: what is free, what a pass takes, and a step that is done again in smaller passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import OptimizerSection, TrainSection  # noqa: E402
from harness.core.failures import failure_of  # noqa: E402
from harness.core.types import FailureClass  # noqa: E402
from harness.inference.lora import trainable  # noqa: E402
from harness.inference.tree import build_tree  # noqa: E402
from harness.training import policy, room  # noqa: E402
from harness.training.optimizer import build_optimizer  # noqa: E402
from harness.training.policy import update_policy  # noqa: E402
from harness.training.room import NoRoomError, Room, Used, pass_bytes, saved_bytes_per_token  # noqa: E402
from tests.torch_support import tiny_llama, with_adapter  # noqa: E402
from tests.training.reference import random_group, relative_difference  # noqa: E402

MIB = 2**20


def some_groups():
    return [
        random_group(f"t{i}", [7] * 5 + [20 + i], [9, 6, 4], [0.5, -0.25, -0.25], 128, i) for i in range(4)
    ]  # each 1 + 19 tokens beyond the root of 5


def learned(**changes):
    """Do one update with plain gradient descent; return what the adapter became, the statistics and the room.

    The rate is so large that what an update adds is not lost in the rounding of what it is added to.
    """
    wrapped = with_adapter(tiny_llama())
    parameters = trainable(wrapped)
    optimizer = build_optimizer(parameters, OptimizerSection(name="sgd", momentum=0.0, learning_rate=100.0))
    section = TrainSection(entropy_beta=0.0, microbatch_tokens=4096, **changes)
    space = Room(section.microbatch_tokens)
    stats = update_policy(
        wrapped.get_base_model(), list(parameters.values()), optimizer, some_groups(), section, 1e9, room=space
    )
    return {name: value.detach().clone() for name, value in parameters.items()}, stats, space


@pytest.fixture
def small_passes(monkeypatch):
    """Let a pass fit only up to a number of tokens; collect what was tried."""
    tried = []

    def install(limit, kind=NoRoomError):
        def check(self, causal_lm, tree, *rest):
            tried.append(tree.tokens)
            if tree.tokens > limit:
                raise kind(f"not enough memory for {tree.tokens} tokens")

        monkeypatch.setattr(Room, "check", check)
        return tried

    return install


def moved(found):
    start = {name: value.detach() for name, value in trainable(with_adapter(tiny_llama())).items()}
    return {name: value - start[name] for name, value in found.items()}


@pytest.mark.parametrize("kind", [NoRoomError, torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize(("limit", "events", "budget"), [(45, 1, 42), (20, 2, 12)])
def test_a_step_that_does_not_fit_is_done_again_in_halves(small_passes, limit, events, budget, kind):
    whole, plain, _ = learned()
    tried = small_passes(limit, kind)
    found, stats, space = learned()
    assert relative_difference(moved(found), moved(whole)) < 1e-5
    assert tried[0] == 5 + 4 * 20 and max(tried[-2:]) <= limit
    assert (space.lowered, space.tokens) == (events, budget)  # half of 85, then half of a group's pass of 25
    assert (stats.tokens, stats.updates) == (plain.tokens, plain.updates)
    assert stats.loss == pytest.approx(plain.loss, rel=1e-5)  # sums of the broken try are not in it
    assert len(torch.cat(stats.gaps)) == plain.tokens
    metrics = stats.metrics()
    assert metrics["perf/out_of_memory"] == events
    assert metrics["perf/microbatch_tokens"] == space.tokens
    assert not {"perf/out_of_memory", "perf/microbatch_tokens"} & set(plain.metrics())


def test_the_gradient_of_the_broken_try_is_thrown_away(monkeypatch):
    """Memory runs out after passes that had already added their gradient."""
    whole, _, _ = learned()
    real, calls = policy.tree_logprobs, []

    def fails_late(causal_lm, tree, *rest):
        calls.append(tree.tokens)
        if len(calls) == 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return real(causal_lm, tree, *rest)

    monkeypatch.setattr(Room, "check", lambda *_: None)
    monkeypatch.setattr(policy, "tree_logprobs", fails_late)
    wrapped = with_adapter(tiny_llama())
    parameters = trainable(wrapped)
    optimizer = build_optimizer(parameters, OptimizerSection(name="sgd", momentum=0.0, learning_rate=100.0))
    section = TrainSection(entropy_beta=0.0, microbatch_tokens=25)
    update_policy(wrapped.get_base_model(), list(parameters.values()), optimizer, some_groups(), section, 1e9)
    found = {name: value.detach() for name, value in parameters.items()}
    assert calls[:3] == [25, 25, 25] and max(calls[3:]) < 25
    assert relative_difference(moved(found), moved(whole)) < 1e-5


def test_later_steps_keep_the_smaller_budget(small_passes):
    tried = small_passes(45)
    wrapped = with_adapter(tiny_llama())
    parameters = list(trainable(wrapped).values())
    optimizer = build_optimizer(parameters, OptimizerSection())
    section, space = TrainSection(entropy_beta=0.0, minibatches=2), Room(4096)
    for _ in range(2):
        stats = update_policy(wrapped.get_base_model(), parameters, optimizer, some_groups(), section, 1.0, room=space)
    assert space.lowered == 0 and max(tried) == 45  # two groups a minibatch: 5 + 40
    section = TrainSection(entropy_beta=0.0)
    for events in (1, 0):
        stats = update_policy(wrapped.get_base_model(), parameters, optimizer, some_groups(), section, 1.0, room=space)
        assert stats.metrics().get("perf/out_of_memory", 0) == events
        assert stats.metrics()["perf/microbatch_tokens"] == 42


def test_ratios_against_the_policy_before_the_updates_survive_a_new_split(small_passes):
    """With an importance correction the old log probabilities are taken once per batch, before the first update."""
    settings = {"minibatches": 2, "importance": "token"}
    whole, _, _ = learned(**settings)
    small_passes(30)
    found, stats, _ = learned(**settings)
    assert stats.metrics()["perf/out_of_memory"] >= 1
    assert relative_difference(moved(found), moved(whole)) < 1e-5


def test_a_single_rollout_that_does_not_fit_ends_the_attempt_as_infrastructure(small_passes):
    small_passes(14)  # the longest rollout: 6 + 9
    with pytest.raises(NoRoomError, match="15 tokens") as caught:
        learned()
    assert failure_of(caught.value) is FailureClass.INFRA


def test_other_errors_are_no_reason_to_try_again(small_passes):
    tried = small_passes(30, ValueError)
    with pytest.raises(ValueError, match="85 tokens"):
        learned()
    assert tried == [85]


def test_dropout_of_a_repeated_step_is_that_of_a_step_with_the_smaller_budget(small_passes, monkeypatch):
    def trained(budget, limit):
        small_passes(limit)
        wrapped = with_adapter(tiny_llama(), dropout=0.3)
        parameters = trainable(wrapped)
        optimizer = build_optimizer(parameters, OptimizerSection())
        section = TrainSection(entropy_beta=0.0, microbatch_tokens=budget)
        torch.manual_seed(5)
        update_policy(wrapped.get_base_model(), list(parameters.values()), optimizer, some_groups(), section, 1.0)
        return {name: value.detach() for name, value in parameters.items()}

    repeated, plain = trained(4096, 45), trained(42, 45)
    assert all(torch.equal(repeated[name], value) for name, value in plain.items())


def test_the_bytes_of_a_token_are_those_autograd_keeps():
    """Counted by layers: twice the layers keep about twice as much, and the frozen weights are not counted."""
    found = {}
    for layers in (2, 4, 8):
        base = with_adapter(tiny_llama(layers=layers)).get_base_model()
        ones = torch.ones(room.PROBE_TOKENS // 2)
        before = torch.get_rng_state()

        def forward(tree, model=base, temperatures=ones):
            return policy.tree_logprobs(model, tree, temperatures)[0]

        found[layers] = saved_bytes_per_token(base, forward)
        assert torch.equal(before, torch.get_rng_state()) and not base.training
    steps = (found[4] - found[2]) / 2, (found[8] - found[4]) / 4
    assert steps[0] == pytest.approx(steps[1], rel=0.02)
    # at least the inputs of the layer's products: 4 of the hidden size and 3 of the MLP's, in float32
    assert 4 * (4 * 48 + 3 * 96) < steps[0] < 40 * (4 * 48 + 3 * 96)


def test_a_pass_takes_more_with_more_tokens_and_less_with_checkpointing():
    config = tiny_llama().config
    small, large = (build_tree([[7] * 5 + [1]], [[[2] * n] * 3], torch.device("cpu")) for n in (50, 100))
    plain = [pass_bytes(config, tree, 64, 10_000.0, False) for tree in (small, large)]
    assert plain[1] > 1.8 * plain[0]
    assert pass_bytes(config, large, 64, 10_000.0, True) < 0.7 * plain[1]


def group_folder(root, limit, usage, cache, second):
    names = ("memory.max", "memory.current", "inactive_file") if second else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # fmt: skip
    root.mkdir(parents=True, exist_ok=True)
    (root / names[0]).write_text(f"{limit}\n")
    (root / names[1]).write_text(f"{usage}\n")
    (root / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def test_limits_of_control_groups_and_of_those_above_them(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/jobs/mine\n")
    group_folder(tmp_path / "fs", 9000, 100, 50, True)
    group_folder(tmp_path / "fs/jobs", "max", 100, 50, True)
    group_folder(tmp_path / "fs/jobs/mine", 4000, 1000, 200, True)
    assert list(room._control_groups(tmp_path / "fs", membership)) == [3200, 8950]
    membership.write_text("5:cpu,memory:/docker/x\n3:pids:/y\n")
    group_folder(tmp_path / "fs/memory/docker/x", 7000, 1000, 0, False)
    assert list(room._control_groups(tmp_path / "fs", membership)) == [6000]
    assert list(room._control_groups(tmp_path / "fs", tmp_path / "absent")) == []


def test_what_the_process_took_since_its_first_pass_is_free_again(monkeypatch):
    monkeypatch.setattr(room, "_control_groups", lambda: iter([500 * MIB]))
    base = Used(1000 * MIB, 3000 * MIB)
    assert room.free_bytes(base, base) == 500 * MIB
    assert room.free_bytes(base, Used(1300 * MIB, 3300 * MIB)) == 800 * MIB
    monkeypatch.setattr(room, "_control_groups", lambda: iter([-5]))
    assert room.free_bytes(base, base) == 0


CHILD = Path(__file__).with_name("memory_child.py")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space hold on Linux")
def test_a_limit_of_address_space_makes_smaller_passes_with_the_same_gradient():
    """In a process of its own: `estimated` refuses a pass before it begins, `caught` lets the allocator fail."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run([sys.executable, str(CHILD)], cwd=root, env=env, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]
    results = json.loads(ended.stdout.splitlines()[-1])
    assert results["estimated"]["refused"] > 0 and results["caught"]["refused"] == 0
    for result in results.values():
        assert result["events"] >= 1 and result["passes"] > 1
        assert result["difference"] < 1e-5
