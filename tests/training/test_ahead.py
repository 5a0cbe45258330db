"""Rollouts sampled ahead: bound, order, versions, resume, failures and shutdown; a second model stands in for vLLM."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from harness.config.load import set_key  # noqa: E402
from harness.config.schema import RunConfig, TrainSection  # noqa: E402
from harness.core.errors import ConfigError, InfraError, StoppedError  # noqa: E402
from harness.inference.lora import save_adapter  # noqa: E402
from harness.rollouts.collect import Sampling, Timing  # noqa: E402
from harness.rollouts.store import read_rollouts  # noqa: E402
from harness.training import crew, policy  # noqa: E402
from harness.training.ahead import Ahead, staleness, within_bound  # noqa: E402
from harness.training.batches import Group  # noqa: E402
from harness.training.draws import Batch, TrainingEnv  # noqa: E402
from harness.training.loop import Trainer  # noqa: E402
from harness.training.losses import policy_loss  # noqa: E402
from harness.training.tasks import TaskStream  # noqa: E402
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402
from tests.training.reference import random_group  # noqa: E402
from tests.training.second_model import SecondModel  # noqa: E402
from tests.training.test_data_loop import ENDS, TOKENIZER, Tasks, adapter, rollouts, rows  # noqa: E402

pytestmark = pytest.mark.torch
THREAD = "sampling-ahead"
SERVER = {"engine": "vllm", "vllm": {"mode": "server"}}


def base():
    return loaded(tiny_llama(vocabulary=len(TOKENIZER), layers=1), TOKENIZER, ENDS)


def trainer(folder, steps, staleness=1, config_sha="c", eval_due=lambda step: False, budget=None, **train):
    """Return a trainer whose engine is a second copy of its model, and that engine."""
    config = RunConfig.model_validate(
        {
            "hypothesis": "h",
            "lora": {"rank": 4, "alpha": 8.0},
            "optimizer": {"learning_rate": 2e-3},
            "train": {
                "steps": steps,
                "tasks_per_step": 2,
                "group_size": 3,
                "preflight_groups": 0,
                "max_staleness": staleness,
                **train,
            },
            "sampling": {"max_tokens": 8, "context": 200},
            "env": [{"id": "letters"}],
            "checkpoint": {"interval": 1},
            "backend": SERVER,
            "budget": budget or {},
        }
    )
    env = Tasks()
    envs = {
        "letters": TrainingEnv(
            config.env[0], env, TaskStream(env.tasks("train"), True, config.train.seed), None, Sampling(8, 1.0, 200)
        )
    }
    engine = SecondModel(folder, base())
    one = Trainer(
        config=config,
        config_sha=config_sha,
        loaded=base(),
        envs=envs,
        folder=folder,
        attempt=1,
        eval_due=eval_due,
        on_eval=lambda *_: None,
        report=lambda update: None,
        vllm=engine,
    )
    return one, engine


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def versions(folder):
    """Return the steps of the policies that sampled each step's rollouts."""
    found = {}
    for path in sorted(folder.glob("rollouts/step_*/letters.jsonl")):
        names = {row["version"] for row in read_rollouts(path)}
        found[int(path.parent.name[5:])] = sorted(int(name.split("-")[2]) for name in names)
    return dict(sorted(found.items()))


def test_a_step_is_trained_while_the_next_one_is_sampled_from_the_policy_before_it(tmp_path, monkeypatch):
    one, engine = trainer(tmp_path, 5)

    def begun():
        return sum(name == THREAD for name, _ in engine.calls)

    def waiting(*args):
        """Train a step only once the batch of the next one is being sampled: alone, in turn, this would never end."""
        step, deadline = one.progress.step + 1, time.monotonic() + 60
        while begun() < min(step + 1, 5):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.05)
        assert begun() == min(step + 1, 5)  # and nothing further ahead
        return policy.update_policy(*args)

    monkeypatch.setattr(crew, "update_policy", waiting)
    one.run()
    assert versions(tmp_path) == {1: [0], 2: [0], 3: [1], 4: [2], 5: [3]}
    table = rows(tmp_path)
    assert [row["train/staleness_max"] for row in table] == [0, 1, 1, 1, 1]
    assert [row["train/staleness_mean"] for row in table] == [0, 1, 1, 1, 1]
    assert all(row["train/groups_stale"] == 0 and row["time/wait"] >= 0 for row in table)
    assert max(row["probe/max"] for row in table) <= 1e-4
    assert engine.versions == [engine.version] and threads() == [] and not engine.closed
    # the ratio is against what the sampler reported, so it moves although a batch is one update
    assert table[0]["train/kl_sampler"] < 1e-9 < max(row["train/kl_sampler"] for row in table[1:])


def test_no_rollout_is_older_than_the_bound_however_slow_the_sampler_is(tmp_path, bound=2):
    one, engine = trainer(tmp_path, 5, staleness=bound, resample_groups=2)
    engine.delay_s = 0.02
    one.run()
    found = versions(tmp_path)
    assert list(found) == list(range(1, 6))
    for step, own in found.items():
        assert all(0 <= step - 1 - version <= bound for version in own)
    ages = [row["train/staleness_max"] for row in rows(tmp_path)]
    assert max(ages) >= 1 and all(age <= bound for age in ages)


def test_without_staleness_nothing_is_sampled_ahead_and_the_same_is_learned_as_ever(tmp_path):
    one, engine = trainer(tmp_path / "a", 3, staleness=0)
    one.run()
    assert {name for name, _ in engine.calls} == {threading.current_thread().name}
    assert not any(key in rows(tmp_path / "a")[0] for key in ("train/staleness_max", "time/wait", "train/groups_stale"))
    path = tmp_path / "a/rollouts/step_1/letters.jsonl"
    assert all("version" not in row for row in read_rollouts(path))
    # tasks and their order do not depend on who samples when
    ahead, _ = trainer(tmp_path / "b", 3)
    ahead.run()
    assert rollouts(tmp_path / "a") == rollouts(tmp_path / "b")


def test_groups_beyond_the_bound_are_counted_and_never_trained(tmp_path, monkeypatch):
    one, _ = trainer(tmp_path, 2)
    trained = []

    def noted(*args):
        trained.append(args[3])
        return policy.update_policy(*args)

    monkeypatch.setattr(crew, "update_policy", noted)
    real = one.sampler.age
    monkeypatch.setattr(one.sampler, "age", lambda version, step: real(version, step) + (9 if step == 1 else 0))
    before = None

    def remember(step):
        nonlocal before
        before = before or adapter(one)
        return False

    one.eval_due = remember
    one.run()
    assert len(trained) == 1  # step 2 had only groups that were too old
    assert all(torch.equal(adapter(one)[name], value) for name, value in before.items())
    row = rows(tmp_path)[1]
    assert row["train/groups_stale"] == 2 and row["train/groups_used"] == 0 and "train/staleness_max" not in row
    assert "train/loss" not in row
    assert all(line["advantage"] == 0 for line in read_rollouts(tmp_path / "rollouts/step_2/letters.jsonl"))


def test_the_bound_keeps_the_young_and_silences_the_old():
    groups = [Group((), (0.5, -0.5)), Group((), (1.0, -1.0))]
    young, old = within_bound(groups, [1, 2], 1)
    assert young == groups[:1] and old == [replace(groups[1], advantages=(0.0, 0.0))]
    assert staleness([0, 1, 3], 1) == {
        "train/groups_stale": 1,
        "train/staleness_mean": 0.5,
        "train/staleness_max": 1,
    }
    assert staleness([3], 1) == {"train/groups_stale": 1}


def test_a_resume_takes_the_same_tasks_and_samples_pending_batches_again(tmp_path):
    whole, _ = trainer(tmp_path / "whole", 5)
    whole.run()
    part, _ = trainer(tmp_path / "part", 3)
    part.run()
    rest, engine = trainer(tmp_path / "part", 5)
    assert rest.resume() == 3
    rest.run()
    assert rollouts(tmp_path / "part") == rollouts(tmp_path / "whole")  # no task is skipped, none comes twice
    found = versions(tmp_path / "part")
    assert found[4] == [3] and found[5] in (
        [3],
        [4],
    )  # from the policy of the checkpoint on
    assert rest.progress.tokens == sum(
        row["tokens"] for path in tmp_path.glob("part/rollouts/*/*") for row in read_rollouts(path)
    )
    assert threads() == [] and engine.versions == [engine.version]


def test_an_engine_that_is_lost_behind_the_training_ends_the_run_as_a_failure_of_the_machine(tmp_path, monkeypatch):
    one, engine = trainer(tmp_path, 50)

    def dying(*args):
        if one.progress.step == 2:
            engine.close()
        return policy.update_policy(*args)

    monkeypatch.setattr(crew, "update_policy", dying)
    engine.delay_s = 0.05
    with pytest.raises(InfraError, match="second model is gone"):
        one.run()
    assert one.progress.step <= 3 and threads() == []


def test_a_batch_that_never_comes_does_not_outlive_an_interrupt(tmp_path):
    one, engine = trainer(tmp_path, 50)
    engine.delay_s = 3600.0  # a call that would go on for an hour

    def interrupt():
        while THREAD not in {name for name, _ in engine.calls}:
            time.sleep(0.005)
        signal.raise_signal(signal.SIGINT)  # received by this thread, heeded by the one that waits for the batch

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert engine.closed and threads() == []


def test_a_budget_ends_the_run_with_a_checkpoint_and_without_what_was_sampled_ahead(tmp_path):
    one, engine = trainer(tmp_path, 50, budget={"tokens": 60})
    engine.delay_s = 0.01
    with pytest.raises(StoppedError, match="budget of 60 sampled tokens"):
        one.run()
    step = one.progress.step
    assert 1 <= step < 50 and (tmp_path / f"checkpoints/step_{step}/manifest.json").is_file()
    assert list(versions(tmp_path)) == list(range(1, step + 1)) and threads() == []


def test_a_bug_in_what_is_sampled_ahead_is_raised_where_the_batch_is_taken():
    def draw(step, rates):
        if step == 2:
            raise RuntimeError("a bug")
        return Batch([], Timing(tokens=step))

    ended = []
    with pytest.raises(RuntimeError, match="a bug"), Ahead(draw, lambda: ended.append(True)) as ahead:
        for step in (1, 2, 3):
            ahead.ask(step, {})
        assert ahead.take(1).timing.tokens == 1
        ahead.take(2)
    assert ended == [True] and threads() == []


def test_a_held_version_stays_until_its_last_user_is_done(tmp_path):
    engine = SecondModel(tmp_path)
    folders = []
    for index in range(3):
        folders.append(tmp_path / str(index))
        save_adapter(engine.model, folders[-1])
    engine.sync("a", folders[0])
    with engine.pinned() as first:
        with engine.pinned() as second:
            engine.sync("b", folders[1])
            assert engine.versions == ["a", "b"] and engine.live == {"a", "b"}
            assert (first.version, second.version, engine.version) == ("a", "a", "b")
            with ThreadPoolExecutor(1) as pool:
                drawn = pool.submit(first.generate, [[1, 4, 5]], 1, 3, 1.0, [[7]]).result()
            assert len(drawn[0]) == 1 and engine.calls[-1][1] == "a"
        assert engine.versions == ["a", "b"]
    assert engine.versions == ["b"] and engine.live == {"b"}
    with engine.pinned():
        pass
    assert engine.versions == ["b"]  # the newest one stays, held or not
    engine.sync("c", folders[2])
    assert engine.versions == ["c"]


@pytest.mark.parametrize(
    ("section", "against"),
    [
        ({}, "trainer"),
        ({"max_staleness": 1}, "sampler"),
        ({"max_staleness": 1, "importance": "token"}, "trainer"),
        ({"max_staleness": 1, "minibatches": 2}, "sampler"),
    ],
)
def test_an_older_policy_s_rollouts_are_never_taken_for_the_trainer_s(section, against, monkeypatch):
    seen = []

    def spy(inputs, totals, section):
        seen.append(inputs)
        return policy_loss(inputs, totals, section)

    monkeypatch.setattr(policy, "policy_loss", spy)
    model = with_adapter(tiny_llama())
    group = random_group("g", [1, 4, 5], [3, 4], [1.0, -1.0], 100, 0)
    policy.accumulate_gradient(model.get_base_model(), [group], TrainSection(**section), policy.StepStats())
    (inputs,) = seen
    expected = {"trainer": inputs.logprobs.detach(), "sampler": inputs.sampler_logprobs}
    assert torch.equal(inputs.old_logprobs, expected[against])
    assert not torch.equal(expected["trainer"], expected["sampler"])


def test_only_a_server_samples_ahead():
    config = RunConfig(hypothesis="h")
    with pytest.raises(ConfigError, match="only a server"):
        set_key(config, "train.max_staleness=1")
    config = set_key(config, "backend.engine=vllm")
    with pytest.raises(ConfigError, match="only a server"):
        set_key(config, "train.max_staleness=1")
    config = set_key(set_key(config, "backend.vllm.mode=server"), "train.max_staleness=2")
    assert config.train.max_staleness == 2
