"""From the metric names of other tools to the ones that reports plot; every other metric keeps its own name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from harness.core.errors import NotFoundError
from harness.core.names import did_you_mean
from harness.core.text import one_line
from harness.imports.model import ImportedEval, Series

_KNOWN: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "train/{env}/reward/mean",
        (
            "reward/mean",
            "reward/all/mean",
            "reward",
            "train/reward",
            "train/reward/mean",
            "rewards/mean",
            "critic/rewards/mean",
            "env/all/reward/total",
        ),
    ),
    ("train/{env}/reward/std", ("reward/std", "reward_std", "train/reward_std")),
    (
        "train/tokens/mean",
        (
            "completion_len/mean",
            "completions/mean_length",
            "train/completions/mean_length",
            "completion_length",
            "response_length/mean",
        ),
    ),
    (
        "train/tokens/min",
        ("completion_len/min", "completions/min_length", "train/completions/min_length", "response_length/min"),
    ),
    (
        "train/tokens/max",
        ("completion_len/max", "completions/max_length", "train/completions/max_length", "response_length/max"),
    ),
    (
        "train/truncated_share",
        ("completions/clipped_ratio", "train/completions/clipped_ratio", "response_length/clip_ratio"),
    ),
    ("train/zero_spread_share", ("frac_reward_zero_std", "train/frac_reward_zero_std")),
    ("train/entropy", ("entropy", "train/entropy", "entropy/mean", "actor/entropy")),
    ("optim/grad_norm", ("grad_norm", "train/grad_norm", "actor/grad_norm")),
    ("optim/learning_rate", ("learning_rate", "train/learning_rate", "optim/lr", "actor/lr")),
)
_COMPONENT = re.compile(r"(?:train/)?(?:rewards/(?P<trl>[^/]+)/mean|metrics/(?P<prime>[^/]+))")
_EVAL = re.compile(r"eval/(?P<env>.+)/(?:avg@(?P<k>\d{1,4})|reward/mean|reward)")
_EVAL_ALONE = ("eval/reward", "eval_reward", "eval/reward/mean", "eval/avg_reward")
_FORMULA = re.compile(r"^[=+\-@\s]+")
MAX_NAME = 200
MAX_EVALS = 200
"""Held-out results recorded one by one; the rest stays in the per-step table."""


def house_names(metrics: Series, env: str, reward: str = "") -> tuple[Series, dict[str, str]]:
    """Return the metrics under the names that reports know, and what was renamed, new name to old.

    Args:
        metrics: as the source names them.
        env: plain name of the training environment.
        reward: the source's name of the training reward; found among the known ones when empty.

    Raises:
        NotFoundError: when `reward` is no metric of the source.
    """
    if reward and reward not in metrics:
        raise NotFoundError(f"there is no metric {reward[:80]!r}", did_you_mean(reward, list(metrics)[:50]))
    wanted: dict[str, str] = {reward: f"train/{env}/reward/mean"} if reward else {}
    for target, known in _KNOWN:
        name = target.format(env=env)
        found = next((key for key in known if key in metrics and key not in wanted), None)
        if found is not None and name not in wanted.values():
            wanted[found] = name
    for key, points in metrics.items():
        match = _COMPONENT.fullmatch(key)
        if match and key not in wanted and all(-1e-9 <= value <= 1 + 1e-9 for value in points.values()):
            wanted[key] = f"train/{env}/component/{_component(match)}"
    renamed: Series = {}
    old_names: dict[str, str] = {}
    for key in metrics:
        name = wanted.get(key, _plain(key))
        if name in renamed or (name != key and name in metrics):
            name = f"{_plain(key)} (as logged)"
        renamed[name] = metrics[key]
        if name != key:
            old_names[name] = one_line(key, MAX_NAME)
    return renamed, old_names


def _component(match: re.Match[str]) -> str:
    name = match["trl"] or match["prime"]
    return _plain(name.removesuffix("_reward") or name)


def _plain(key: str) -> str:
    """Return a metric's name as one harmless line: a name that begins like a formula loses that beginning."""
    return _FORMULA.sub("", one_line(key, MAX_NAME)) or "unnamed"


def held_out(
    metrics: Series, env: str, slug: Mapping[str, str], *, base_first: bool, requested: int | None, samples: int | None
) -> tuple[ImportedEval, ...]:
    """Return the held-out results among the metrics.

    Args:
        metrics: as the source names them.
        env: environment of results whose name has none.
        slug: plain names of the environments, by the name in the metric.
        base_first: the source evaluates the untrained model before its first step.
        requested: scored samples per eval, as far as the config tells.
        samples: samples per task, as far as the config tells.
    """
    found = []
    for key, points in metrics.items():
        match = _EVAL.fullmatch(key)
        if match is None and key not in _EVAL_ALONE:
            continue
        name = slug.get(match["env"], "imported") if match else env
        per_task = int(match["k"]) if match and match["k"] else samples
        for step, value in sorted(points.items()):
            base = base_first and step <= 1
            found.append(
                ImportedEval(
                    env=name,
                    step=0 if base else step,
                    subject="base" if base else "policy",
                    means={"reward": value},
                    metric=one_line(key, MAX_NAME),
                    source_step=step,
                    requested=requested,
                    samples=per_task,
                )
            )
    found.sort(key=lambda item: (item.step, item.env))
    return tuple(found[:1] + found[-(MAX_EVALS - 1) :] if len(found) > MAX_EVALS else found)


def eval_names(metrics: Series) -> set[str]:
    """Return the environments that held-out metrics name, as the source spells them."""
    return {match["env"] for key in metrics if (match := _EVAL.fullmatch(key))}
