"""The effective step of a run and its warning, against the runs the threshold was taken from."""

from __future__ import annotations

import pytest

from harness.config.schema import RunConfig
from harness.config.steps import COLLAPSES, collapse_step, effective_step, known_size, step_warning

TRINITY = 26e9


def run(rate, alpha, rank=16, name="adamw"):
    return RunConfig.model_validate(
        {
            "hypothesis": "h",
            "optimizer": {"learning_rate": rate, "name": name},
            "lora": {"alpha": float(alpha), "rank": rank},
        }
    )


def test_by_hand():
    assert effective_step(run(2e-4, 32)) == pytest.approx(4e-4)
    assert effective_step(run(1e-5, 64)) == pytest.approx(4e-5)
    assert effective_step(run(1e-5, 64, rank=64)) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("rate", "alpha", "warned"),
    [(1e-6, 16, False), (1e-6, 128, False), (3e-6, 64, False), (5e-6, 64, False), (1e-5, 64, True), (2e-5, 128, True)],
)
def test_of_the_published_runs_only_the_collapsed_one_is_warned_of(rate, alpha, warned):
    for size in (TRINITY, None):
        warning = step_warning(run(rate, alpha), size)
        assert (warning is not None) == warned
        assert warning is None or "w1-alpha64-lr1e-5" in warning


def test_of_the_committed_runs_only_those_of_the_collapsed_config_are_warned_of():
    small = known_size("smollm2-135m")
    assert step_warning(run(2e-4, 32), small) is None
    assert "note on run-001" in str(step_warning(run(3e-4, 32), small))
    assert known_size("owner/name") is None


def test_between_the_two_sizes_the_limit_falls_and_beyond_them_it_stays():
    sizes = [1e6, 135e6, 500e6, 1.7e9, 7e9, 26e9, 400e9]
    limits = [collapse_step(size) for size in sizes]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == limits[1] == COLLAPSES[0].step and limits[-1] == limits[-2] == COLLAPSES[1].step
    assert limits[2] > limits[3] > limits[4] > limits[5]
    middle = (135e6 * 26e9) ** 0.5
    assert collapse_step(middle) == pytest.approx((6e-4 * 4e-5) ** 0.5)


def test_optimizers_with_another_scale_are_not_judged():
    assert step_warning(run(1.0, 64, name="sgd"), TRINITY) is None
    assert step_warning(run(1.0, 64, name="muon"), TRINITY) is not None
