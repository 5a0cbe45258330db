"""Watchdogs: rules over the metrics of a run that stop it or mark it, and say why. Pure, and free of torch.

Every rule compares a run with itself or with the noise of its own evaluations, never with another run's scale, so
the same rules hold for rewards of any size, for few rollouts a step and for many. `docs/watchdogs.md` has what each
of them says of twelve published runs, and how often noise alone sets it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy import stats

from harness.config.schema import WatchdogSection
from harness.core.numbers import number_or_none

Rule = Literal["collapse", "divergence", "non_finite", "kl", "entropy", "zero_spread"]
RULES: tuple[Rule, ...] = ("collapse", "divergence", "non_finite", "kl", "entropy", "zero_spread")
REFERENCE, FEWEST = 50, 10
"""Rows before a streak that say what is normal for a series: at most, and at least."""
HALF = 0.5
"""Share of its level below which a row is low; a streak of low rows is what noise is tested against."""
RARE = 1 / 3
"""Share of low rows above which a series has no level that it could fall from."""
TREND = 10
"""Rows at either end whose means say whether the training reward rose."""
KL_ROWS, ENTROPY_ROWS, SPREAD_ROWS = 3, 5, 10


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule saw.

    Args:
        rule: its name, a key of `[watchdog]`.
        action: `stop` or `mark`.
        step: after which it was seen.
        key: the metric, or the environment for held-out scores.
        reason: one sentence with the numbers.
    """

    rule: Rule
    action: str
    step: int
    key: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return it as the `finished` event holds it."""
        return {
            "rule": self.rule,
            "action": self.action,
            "step": self.step,
            "key": self.key,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out evaluation of a policy against the base model.

    Args:
        step: of the policy; 0 after a warm start.
        env: environment id.
        difference: mean reward of the policy minus that of the base model.
        error: standard error of the difference, above 0.
        degrees: degrees of freedom of the error, at least 1.
    """

    step: int
    env: str
    difference: float
    error: float
    degrees: int


def replicated(base: Sequence[float], points: Mapping[int, float], env: str = "heldout") -> list[HeldOut]:
    """Return held-out points whose noise is that of repeated evaluations of one base model.

    A new evaluation differs from the mean of m earlier ones by s·sqrt(1 + 1/m), with s their standard deviation: the
    prediction interval of one further observation, Student's t with m - 1 degrees of freedom.

    Args:
        base: at least two scores of the same model on the same items.
        points: step → score of the policy.
        env: their environment.

    Raises:
        ValueError: when fewer than two scores, or only equal ones, leave the noise unknown.
    """
    if len(base) < 2 or len(set(base)) < 2:
        raise ValueError("the noise of an evaluation needs at least two different scores of one model")
    mean, spread = float(np.mean(base)), float(np.std(base, ddof=1))
    error = spread * math.sqrt(1 + 1 / len(base))
    return [HeldOut(step, env, value - mean, error, len(base) - 1) for step, value in sorted(points.items())]


def paired(evals: Iterable[Mapping[str, Any]], confidence: float) -> list[HeldOut]:
    """Return the held-out points of `evaluated` events that hold a paired gain over the base model.

    The standard error is read back from the interval: half its width over the quantile of Student's t with
    clusters - 1 degrees of freedom (`harness.evaluation.statistics`).

    Args:
        evals: data of the events; those of the base, or without a finite interval, are left out.
        confidence: of their intervals.
    """
    points = []
    for data in evals:
        gain = (data.get("gain") or {}).get("reward") or {}
        mean, low, high = (number_or_none(gain.get(name)) for name in ("mean", "low", "high"))
        degrees = int(gain.get("clusters") or 0) - 1
        if data.get("subject") != "policy" or mean is None or low is None or high is None or degrees < 1:
            continue
        width = max(high - mean, mean - low)  # a bound that the range of the reward cut off is the shorter one
        if not (math.isfinite(width) and width > 0):
            continue
        error = width / float(stats.t.ppf(0.5 + confidence / 2, degrees))
        points.append(HeldOut(int(data["step"]), str(data["env"]), mean, error, degrees))
    return sorted(points, key=lambda point: point.step)


def collapse_reason(values: Sequence[float], reward: Sequence[float], limits: WatchdogSection) -> str | None:
    """Say why a series has collapsed, or None.

    A series that was never negative has a level: the mean of up to 50 rows before the rows that are now low. A row
    below half of it is low. k low rows at the end are a collapse when (1) rows as low were so rare before, at most a
    third, that k in a row are noise with a probability of at most `collapse_alpha` / n, where n counts the rows that
    could have begun such a streak (the share of low rows before, with one more low row assumed, to the power k); (2)
    the last half of them, and at least two, are below `collapse_floor` of the level on average; and (3) the reward
    fell with it, by more than three standard errors: a penalty that falls to zero is no collapse.

    Args:
        values: the series, oldest first.
        reward: the reward on the same rows; empty when there is none.
        limits: the thresholds.
    """
    found = _streak(values)
    if found is None:
        return None
    streak, before, level = found
    last = values[-max(2, streak // 2) :]
    if sum(last) / len(last) >= limits.collapse_floor * level:
        return None
    low = sum(value < HALF * level for value in before)
    chance = ((low + 1) / (len(before) + 2)) ** streak
    noise = low > RARE * len(before) or chance > limits.collapse_alpha / max(len(values) - FEWEST, 1)
    if noise or not _fell(reward, streak):
        return None
    return f"fell from {level:.3g} to {values[-1]:.3g}, {streak} steps in a row below half of what it was"


def _streak(values: Sequence[float]) -> tuple[int, Sequence[float], float] | None:
    """Return how many of the last rows are low, the rows before them and their mean; None when there is no such."""
    longest = min(len(values) - FEWEST, REFERENCE)
    if longest < 2 or min(values[-2:]) < 0:
        return None
    streak = 0
    while streak < longest:
        before = values[: len(values) - streak - 1][-REFERENCE:]
        if not values[-streak - 1] < HALF * sum(before) / len(before):
            break
        streak += 1
    if streak < 2:
        return None
    before = values[: len(values) - streak][-REFERENCE:]
    level = sum(before) / len(before)
    if min(before) < 0 or level <= 0:
        return None
    return streak, before, level


def _fell(reward: Sequence[float], streak: int) -> bool:
    """Say whether the reward of the streak is below what it was; true when there is no reward to ask."""
    before = np.asarray(reward[: len(reward) - streak][-REFERENCE:])
    if not len(before):
        return True
    now = float(np.mean(reward[len(reward) - streak :]))
    return now < float(before.mean()) - 3 * float(before.std()) / math.sqrt(streak)


def divergence_quantile(looks: int, degrees: int, alpha: float) -> float:
    """Return how many standard errors below the base model the held-out score of a look counts as a fall.

    Look k spends alpha / (k (k + 1)) of the error; over any number of looks that sums up to at most alpha.
    """
    return float(stats.t.isf(alpha / (looks * (looks + 1)), degrees))


def rose(reward: Sequence[float]) -> bool:
    """Say whether the mean of the last rows is above that of the first ones; False for fewer than two rows."""
    rows = min(TREND, len(reward) // 2)
    return rows > 0 and sum(reward[-rows:]) > sum(reward[:rows])


@dataclass(slots=True)
class Watchdog:
    """The rules with what they have seen of one run; each finding is told once.

    Args:
        limits: the `[watchdog]` section.
    """

    limits: WatchdogSection
    findings: list[Finding] = field(default_factory=list)
    _series: dict[str, list[float]] = field(default_factory=dict)
    _rewards: dict[str, list[float]] = field(default_factory=dict)
    """Of every component: the reward of its environment on the same rows."""
    _looks: dict[str, set[int]] = field(default_factory=dict)

    @property
    def stops(self) -> list[Finding]:
        """The findings that end the run."""
        return [finding for finding in self.findings if finding.action == "stop"]

    def observe(self, row: Mapping[str, Any]) -> list[Finding]:
        """Take one metrics row, in order of steps, and return what is new.

        Args:
            row: `step` and numbers; keys that no rule knows are ignored.
        """
        step = int(row["step"])
        numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
        for key, value in numbers.items():
            if math.isfinite(value):
                self._series.setdefault(key, []).append(value)
        new = self._non_finite(step, numbers)
        for key, value in numbers.items():
            if math.isfinite(value):
                new += self._look_at(step, key, numbers)
        return new

    def observe_heldout(self, points: Iterable[HeldOut]) -> list[Finding]:
        """Take the held-out points so far, and return what is new; a point that was seen before is left out."""
        new = []
        for point in points:
            seen = self._looks.setdefault(point.env, set())
            if point.step not in seen:
                seen.add(point.step)
                new += self._diverged(point, len(seen))
        return new

    def _look_at(self, step: int, key: str, numbers: Mapping[str, float]) -> list[Finding]:
        """Apply the rules that look at one series."""
        values = self._series[key]
        if key.startswith("train/kl_"):
            return self._above(step, key, values[-KL_ROWS:])
        if key == "train/entropy":
            return self._entropy(step, values)
        if key == "train/zero_spread_share":
            return self._spread(step, values[-SPREAD_ROWS:])
        env = watched(key)
        if env is None:
            return []
        reward = reward_key(env)
        rewards: list[float] = []
        if key != reward and math.isfinite(numbers.get(reward, math.nan)):
            rewards = self._rewards.setdefault(key, [])
            rewards.append(numbers[reward])
        # a component that is logged without its reward now and then has nothing to be compared with row by row
        reason = collapse_reason(values, rewards if len(rewards) == len(values) else (), self.limits)
        return [] if reason is None else self._tell("collapse", step, key, f"{key} {reason}")

    def _non_finite(self, step: int, numbers: Mapping[str, float]) -> list[Finding]:
        found = []
        for key, value in numbers.items():
            known = key in ("train/loss", "optim/grad_norm") or watched(key) is not None
            if known and not math.isfinite(value):
                found += self._tell("non_finite", step, key, f"{key} is {value}")
        return found

    def _above(self, step: int, key: str, last: Sequence[float]) -> list[Finding]:
        if len(last) < KL_ROWS or min(last) <= self.limits.kl_limit:
            return []
        text = f"{key} is {last[-1]:.3g} nats per token, above {self.limits.kl_limit:g} for {KL_ROWS} steps"
        return self._tell("kl", step, key, text)

    def _entropy(self, step: int, values: Sequence[float]) -> list[Finding]:
        if len(values) < 2 * ENTROPY_ROWS:
            return []
        first, last = (sum(part) / ENTROPY_ROWS for part in (values[:ENTROPY_ROWS], values[-ENTROPY_ROWS:]))
        if last >= self.limits.entropy_floor * first:
            return []
        text = f"train/entropy fell from {first:.3g} to {last:.3g} nats per token: the policy hardly varies any more"
        return self._tell("entropy", step, "train/entropy", text)

    def _spread(self, step: int, last: Sequence[float]) -> list[Finding]:
        share = sum(last) / len(last)
        if len(last) < SPREAD_ROWS or share < self.limits.zero_spread_limit:
            return []
        text = f"{share:.0%} of the groups of the last {SPREAD_ROWS} steps have no spread, so they teach nothing"
        return self._tell("zero_spread", step, "train/zero_spread_share", text)

    def _diverged(self, point: HeldOut, looks: int) -> list[Finding]:
        distance = -point.difference / point.error
        limit = divergence_quantile(looks, point.degrees, self.limits.divergence_alpha)
        if distance <= limit:
            return []
        reward = self._series.get(reward_key(point.env)) or self._only_reward()
        text = (
            f"the held-out reward of {point.env} is {-point.difference:.3g} below the base model, {distance:.1f} "
            f"standard errors (limit {limit:.1f})"
        )
        if rose(reward):
            return self._tell("divergence", point.step, point.env, f"{text}, while the training reward rose")
        # both fell: a bad stretch, which training may still leave
        return self._tell("divergence", point.step, point.env, f"{text}; the training reward did not rise", mark=True)

    def _only_reward(self) -> Sequence[float]:
        """Return the training reward of a run that trains on one environment under another name."""
        rewards = [values for key, values in self._series.items() if key.endswith("/reward/mean")]
        return rewards[0] if len(rewards) == 1 else ()

    def _tell(self, rule: Rule, step: int, key: str, reason: str, mark: bool = False) -> list[Finding]:
        action = getattr(self.limits, rule)
        if mark and action == "stop":
            action = "mark"
        known = any((f.rule, f.key, f.action) == (rule, key, action) for f in self.findings)
        if action == "off" or known:
            return []
        self.findings.append(Finding(rule, action, step, key, reason))
        return self.findings[-1:]


def marks(findings: Iterable[Finding]) -> dict[str, float]:
    """Return what a metrics row holds of findings: `watchdog/<rule>` is 1 at the step where it was seen."""
    return {f"watchdog/{finding.rule}": 1.0 for finding in findings}


def watched(key: str) -> str | None:
    """Return the environment whose reward, or a component of it, a metric is; None for every other metric."""
    parts = key.split("/")
    if len(parts) == 4 and parts[0] == "train" and (parts[2] == "component" or parts[2:] == ["reward", "mean"]):
        return parts[1]
    return None


def reward_key(env: str) -> str:
    """Return the metric that holds the mean training reward of an environment."""
    return f"train/{env}/reward/mean"


def replay(
    rows: Iterable[Mapping[str, Any]],
    heldout: Sequence[HeldOut] = (),
    limits: WatchdogSection | None = None,
    *,
    on_finding: Callable[[Finding], None] | None = None,
) -> Watchdog:
    """Show a run's whole record to the rules, as they would have seen it while it trained.

    Args:
        rows: current metrics rows; several rows of one step are merged, the last value counts.
        heldout: held-out points; each is looked at after its step's row.
        limits: the thresholds; those of the defaults when None.
        on_finding: called with every finding as it comes.
    """
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(int(row["step"]), {}).update(row)
    watchdog = Watchdog(limits or WatchdogSection())
    waiting = sorted(heldout, key=lambda point: point.step)
    for step in sorted({*merged, *(point.step for point in waiting)}):
        new = watchdog.observe(merged[step]) if step in merged else []
        due = [point for point in waiting if point.step == step]
        for finding in [*new, *watchdog.observe_heldout(due)]:
            if on_finding is not None:
                on_finding(finding)
    return watchdog
