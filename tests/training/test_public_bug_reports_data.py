"""Public bug reports of other trainers, items 25 to 28: resume, splits, means of evals, dead groups.

The item numbers are those of docs/training-checklist.md.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from harness.backends.local import check_leaks  # noqa: E402
from harness.core.errors import ConfigError, NotFoundError, RefusedError, UsageError  # noqa: E402
from harness.core.types import FailureClass  # noqa: E402
from harness.envs.registry import ENVIRONMENTS  # noqa: E402
from harness.evaluation.heldout import load_suites  # noqa: E402
from harness.evaluation.records import ItemRecord  # noqa: E402
from harness.evaluation.summary import summarise  # noqa: E402
from harness.program.documents import Context  # noqa: E402
from harness.training.preflight import informative_share  # noqa: E402
from tests.toy_env import SPEC  # noqa: E402
from tests.training.test_data_loop import assert_resumes_alike, trainer  # noqa: E402


@pytest.mark.parametrize("cut", [1, 3])
def test_item_25_a_resume_replays_and_skips_nothing(tmp_path, cut):
    """Adapter, moments, schedule, random numbers, task cursor, curriculum, resampled groups: bit-equal to one run."""
    envs = (("letters", 2.0, 0.3), ("words", 1.0, 0.0))
    whole = assert_resumes_alike(
        tmp_path, 4, cut, envs=envs, resample_groups=2, curriculum="pass_rate", minibatches=2, seed=cut
    )
    assert whole.progress.step == 4 and whole.progress.pass_rates


def context(**changes):
    env = {"id": "toy", "items": 6, "samples": 1, "max_tokens": 8, "temperature": 0.7} | changes
    return Context.model_validate({"model": {"name": "m"}, "eval": {"seed": 0, "interval": 10, "env": [env]}})


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "toy", SPEC)


def test_item_26_an_eval_split_is_never_the_train_split(toy, tmp_path):
    """No fallback to other rows, no smaller eval than asked for, no task on both sides."""
    (suite,) = load_suites(context())
    assert [task.split for task in suite.tasks] == ["heldout"] * 6
    with pytest.raises(NotFoundError, match="no split 'test'"):
        load_suites(context(split="test"))
    with pytest.raises(ConfigError, match="asks for 7 items of toy/heldout, which has 6"):
        load_suites(context(items=7))
    envs = trainer(tmp_path, 1).envs
    (leaking,) = load_suites(context(args={"leak": True}))
    envs["toy"] = envs["letters"]
    envs["toy"].env = leaking.env
    with pytest.raises(RefusedError, match="is trained on too"):
        check_leaks(envs, [leaking])


def items(rewards, **changes):
    return [
        ItemRecord(f"t{n}", f"t{n}", 0, reward, {"accuracy": accuracy}, {}, failure)
        for n, (reward, accuracy, failure) in enumerate(rewards)
    ]


def test_item_27_an_eval_is_a_mean_over_items_with_n_failures_and_interval():
    """One row per item, errors shown beside the mean and not inside it, accuracy beside a reward that saturates."""
    wrong, lost = FailureClass.MODEL, FailureClass.INFRA
    rewards = [(1.0, 1.0, None), (1.0, 0.0, wrong), (1.0, 0.0, wrong), (0.0, 0.0, lost)]
    found = summarise(items(rewards), requested=5, confidence=0.95, base=None, base_shipped=None)
    assert (found["n"], found["requested"], found["failures"]) == (3, 5, {"infra": 1, "model": 2})
    assert found["means"]["reward"]["mean"] == 1.0
    assert found["means"]["accuracy"]["mean"] == pytest.approx(1 / 3)
    assert found["means"]["accuracy"]["low"] < 1 / 3 < found["means"]["accuracy"]["high"]
    from harness.evaluation.statistics import paired_difference

    twice = items(rewards) + items(rewards[:1])
    with pytest.raises(UsageError, match="twice"):
        paired_difference(twice, items(rewards), "reward", 0.95)


def test_item_28_dead_groups_are_estimated_before_the_first_step(tmp_path):
    """Two answers at a pass rate of 0.18 leave 70 % of the groups without signal; the preflight says so."""
    assert 1 - informative_share(0.18, 2) == pytest.approx(0.7048)
    assert informative_share(0.18, 16) > 0.95
    one = trainer(tmp_path, 1, group_size=2)
    one.run()
    seen = one.preflight
    assert seen.metrics()["preflight/informative_expected"] == informative_share(seen.pass_rate, 2)
    with pytest.raises(RefusedError, match="cannot learn"):
        trainer(tmp_path / "dead", 1, envs=(("letters", 1.0, 1.0),), preflight_groups=4).run()
