"""What a report needs beyond the ledger, derived once where the run directory and the data are at hand."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.core.canonical import canonical_json, encode_non_finite, strict_loads
from harness.core.errors import ConfigError, HarnessError
from harness.envs.registry import ENVIRONMENTS, load_environment
from harness.evaluation.records import read_items
from harness.ledger.results import current_evals
from harness.reports.collect import flatten

if TYPE_CHECKING:
    from harness.core.types import Task
    from harness.envs.base import Environment
    from harness.ledger import RunState
    from harness.program import Context

# An allow-list: a capture file must never carry environment variables or keys into a commit.
_CAPTURED = (
    "commit",
    "dirty_sha",
    "packages_sha",
    "python",
    "hardware",
    "device",
    "dtype",
    "threads",
    "capability",
    "torch_version",
)
EMPTY: Mapping[str, Any] = {
    "capture": {},
    "packages": {},
    "redistributable": {},
    "labels": [],
    "baselines": [],
    "broken_lines": 0,
}


class Evaluated(NamedTuple):
    """An environment with the arguments of an eval, and the tasks the eval answered."""

    env: Environment
    tasks: list[Task]


def capture(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the allowed members of a captured environment, flattened, and its package versions."""
    try:
        data = strict_loads(path.read_bytes())
    except (OSError, ValueError):
        return {}, {}
    if not isinstance(data, dict):
        return {}, {}
    packages = data.get("packages")
    versions = {str(k): str(v) for k, v in packages.items()} if isinstance(packages, dict) else {}
    return flatten({key: data[key] for key in _CAPTURED if key in data}), versions


def redistributable(env: str, args: Mapping[str, Any]) -> bool:
    """Say whether an environment's source text may stand in a committed report.

    False also when the environment cannot be loaded: without the data nobody can tell.
    """
    try:
        loaded = load_environment(env, dict(args))
    except (HarnessError, OSError):
        return False
    return bool(loaded.redistributable)


def training_args(state: RunState) -> dict[str, dict[str, Any]]:
    """Return the arguments of the environments a run trained on, by id."""
    started = [attempt["basis"] for attempt in state.attempts if attempt.get("basis")]
    config = (started[-1] if started else state.created.get("basis") or {}).get("config") or {}
    entries = config.get("env") or ()
    return {str(entry["id"]): dict(entry.get("args") or {}) for entry in entries}


def evaluated_tasks(root: Path, state: RunState, context: Context) -> dict[str, Evaluated]:
    """Return by environment the very tasks that the run's last eval answered, in the order of their split.

    An eval records split and arguments; for one that did not, CONTEXT.md and then the training arguments
    are tried. CONTEXT.md alone would be wrong: it may have been amended since. An environment whose
    tasks cannot all be found here is left out.
    """
    found: dict[str, Evaluated] = {}
    trained = training_args(state)
    for name in sorted({str(entry["env"]) for entry in current_evals(state)}):
        last = _last_eval(current_evals(state), name, "policy") or _last_eval(current_evals(state), name, "base")
        frozen = context.eval_env(name)
        split = frozen.split if frozen else "heldout"
        recorded = last.get("protocol")
        choices = [(frozen.args if frozen else {}, split), (trained.get(name, {}), split)]
        if recorded:
            choices = [(recorded["args"], recorded["split"])]
        for args, chosen in choices:
            try:
                wanted = {item.task for item in read_items(root / str(last["file"]))}
                env = load_environment(name, dict(args))
                tasks = [task for task in env.tasks(chosen) if task.id in wanted]
            except (HarnessError, OSError, KeyError):
                continue
            if wanted and len(tasks) == len(wanted):
                found[name] = Evaluated(env, tasks)
                break
    return found


def label_rows(root: Path, state: RunState, evaluated: Mapping[str, Evaluated]) -> list[dict[str, Any]]:
    """Return held-out accuracy by label, base against policy, under the run's prompt.

    Args:
        evaluated: as `evaluated_tasks` returns them; other environments have no rows.
    """
    rows: list[dict[str, Any]] = []
    for name, (_, tasks) in evaluated.items():
        labels = {task.id: task.label for task in tasks}
        evals = {subject: _last_eval(current_evals(state), name, subject) for subject in ("base", "policy")}
        if not evals["policy"]:
            continue
        try:
            base = _by_label(root / str(evals["base"]["file"]), labels) if evals["base"] else {}
            policy = _by_label(root / str(evals["policy"]["file"]), labels)
        except (HarnessError, OSError):
            continue
        for label in sorted(policy):
            before = base.get(label)
            rows.append(
                {
                    "env": name,
                    "label": label,
                    "n": len(policy[label]),
                    "base": _mean(before) if before else None,
                    "policy": _mean(policy[label]),
                }
            )
    return rows


def _last_eval(evals: Sequence[Mapping[str, Any]], env: str, subject: str) -> Mapping[str, Any]:
    """Return the eval of the highest step under the run's prompt that has an item file; empty without one."""
    found = [e for e in evals if e["env"] == env and e["subject"] == subject and e["prompt"] == "run" and e.get("file")]
    return max(found, key=lambda e: int(e.get("step") or 0), default={})


def _by_label(path: Path, labels: Mapping[str, str]) -> dict[str, list[float]]:
    grouped: dict[str, list[float]] = defaultdict(list)
    for item in read_items(path):
        value = item.value("accuracy")
        if item.counts and value is not None and item.task in labels:
            grouped[labels[item.task]].append(value)
    return grouped


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6)


def baseline_rows(evaluated: Mapping[str, Evaluated]) -> list[dict[str, Any]]:
    """Return what each environment's model-free answers reach on the tasks that were evaluated."""
    rows: list[dict[str, Any]] = []
    for name, (env, tasks) in evaluated.items():
        module = env_module(name, "baselines")
        found = module.report_rows(env, tasks) if module else ()
        rows += [{"env": name, "name": n, "metric": m, "value": round(v, 6)} for n, m, v in found]
    return rows


def part_rows(root: Path, state: RunState, evaluated: Mapping[str, Evaluated]) -> list[dict[str, Any]]:
    """Return, base against policy under the run's prompt, the metrics that only a part of an eval's items has.

    An `evaluated` event gives no means of these, since their denominators are smaller; here each row says over how
    many items. Measures over a whole set, which an environment's `metrics.corpus_metrics` computes, stand with them.
    """
    rows: list[dict[str, Any]] = []
    for name in evaluated:
        evals = {subject: _last_eval(current_evals(state), name, subject) for subject in ("base", "policy")}
        try:
            module = env_module(name, "metrics")
            found = {s: _parts(root / str(e["file"]), module) if e else {} for s, e in evals.items()}
        except (HarnessError, OSError):
            continue
        for metric in sorted({*found["base"], *found["policy"]}):
            base, policy = found["base"].get(metric), found["policy"].get(metric)
            counted = policy or base
            rows.append(
                {
                    "env": name,
                    "metric": metric,
                    "n": counted[1] if counted else 0,
                    "base": base and base[0],
                    "policy": policy and policy[0],
                }
            )
    return rows


def _parts(path: Path, module: ModuleType | None) -> dict[str, tuple[float, int]]:
    """Return (mean, items) of the metrics that some counted items of a file lack, and the measures of its set."""
    items = [{**item.components, **item.metrics} for item in read_items(path) if item.counts]
    values: dict[str, list[float]] = defaultdict(list)
    for item in items:
        for name, value in item.items():
            values[name].append(value)
    parts = {name: (_mean(have), len(have)) for name, have in values.items() if len(have) < len(items)}
    over_all = module.corpus_metrics(items) if module else {}
    return parts | {name: (round(value, 6), len(items)) for name, value in over_all.items()}


def env_module(env: str, name: str) -> ModuleType | None:
    """Return an optional module of an environment's package; None where it has none."""
    module = f"harness.envs.{env.replace('-', '_')}.{name}"
    return importlib.import_module(module) if env in ENVIRONMENTS and _exists(module) else None


def _exists(module: str) -> bool:
    package = module.rpartition(".")[0]  # find_spec raises where the package itself is missing
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def dump_summary(summary: Mapping[str, Any]) -> str:
    """Return the summary as JSON, one member a line, so that a diff of it can be read."""
    encoded = encode_non_finite(summary)
    members = [f'"{key}":{canonical_json(encoded[key])}' for key in sorted(encoded)]
    return "{\n" + ",\n".join(members) + "\n}\n"


def parse_summary(data: str, where: str) -> dict[str, Any]:
    """Read the summary back.

    Raises:
        ConfigError: when it is damaged.
    """
    try:
        value = strict_loads(data)
    except ValueError as error:
        raise ConfigError(
            f"{where} is damaged: {error}", "take it back from git, or run `harness report` again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where} is damaged: not a JSON object", "take it back from git, or run `harness report` again"
        )
    return {**EMPTY, **value}
