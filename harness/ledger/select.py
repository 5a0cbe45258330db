"""Choosing runs: columns by name, conditions on them, and an order; pure, over the folded state.

A column is a fixed fact of a run (`status`), a metric of its last held-out evals (`reward`,
`accuracy_gain.low`, `reward.drugprot`), a dotted key of its config (`lora.alpha`), or the last value of a training
metric that an imported run brought.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

from harness.core.errors import UsageError
from harness.core.names import did_you_mean
from harness.core.numbers import number_or_none
from harness.ledger.fold import RunState
from harness.ledger.results import last_policy_evals, protocol_of, reference_protocols

Getter = Callable[[RunState], Any]
_CONDITION = re.compile(r"\s*([^\s=!<>~]+)\s*(>=|<=|!=|==|=|>|<|~)\s*(.*?)\s*", re.DOTALL)
_EXAMPLE = '`--where "status=completed"`, `--where "gain.low>0"`; operators are = != > >= < <= and ~ (contains)'
_BOUNDS = ("mean", "low", "high")
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}


class Column(NamedTuple):
    """One column: `show` gives what `--json` prints, `value` what is compared; None where a run has none.

    `env` is set for a metric of one environment.
    """

    name: str
    show: Getter
    value: Getter
    is_gain: bool = False
    env: str | None = None


class Condition(NamedTuple):
    """`column operator text`, as `--where` takes it."""

    column: Column
    operator: str
    text: str

    def matches(self, run: RunState) -> bool:
        """Tell whether a run fulfils the condition; a missing value fulfils `!=` and `=none` only."""
        value = self.column.value(run)
        if self.operator in ("=", "!="):
            return _equal(value, self.text) == (self.operator == "=")
        if value is None:
            return False
        if self.operator == "~":
            return self.text.casefold() in _spelt(value).casefold()
        return self._ordered(value)

    def _ordered(self, value: Any) -> bool:
        if isinstance(value, str):
            left: Any = value
            right: Any = self.text
        else:
            left, right = number_or_none(value), _number(self.text)
            if right is None:
                raise UsageError(f"{self.column.name} is compared with a number, not with {self.text!r}", _EXAMPLE)
            if left is None:
                return False
        return bool({">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[self.operator])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _spelt(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _equal(value: Any, text: str) -> bool:
    """Compare as people write: 2 equals 2.0, `none` is an absent value, a list equals each of its members."""
    if value is None or value == "":
        return text in ("", "none")
    if isinstance(value, bool):
        return value is _TRUTH.get(text.lower())
    if isinstance(value, list | tuple):
        return any(_equal(item, text) for item in value)
    number, wanted = number_or_none(value), _number(text)
    if number is not None:
        return wanted is not None and number == wanted
    return _spelt(value) == text


def flat_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a stored config as dotted keys; tables of a list go by their `id`. Takes any JSON value."""
    if isinstance(config, Mapping) and not ("$non_finite" in config and len(config) == 1):
        flat: dict[str, Any] = {}
        for key, value in config.items():
            flat |= flat_config(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    tables = isinstance(config, list) and bool(config) and all(isinstance(t, Mapping) and "id" in t for t in config)
    if tables:
        pairs = [({k: v for k, v in table.items() if k != "id"}, f"{prefix}.{table['id']}") for table in config]
        return {key: value for table, name in pairs for key, value in flat_config(table, name).items()}
    return {prefix: config} if prefix else {}


def run_config(run: RunState) -> Mapping[str, Any]:
    """Return the resolved config a run has on record: of its last attempt, else of its creation; empty without one."""
    bases = [attempt.get("basis") for attempt in reversed(run.attempts)] + [run.created.get("basis")]
    for basis in bases:
        if isinstance(basis, Mapping) and isinstance(basis.get("config"), Mapping) and basis["config"]:
            return basis["config"]
    imported = run.created.get("settings")
    return imported if isinstance(imported, Mapping) else {}


class Columns:
    """The columns that a set of runs has.

    Args:
        runs: all runs of the program.
        fixed: facts by name; their value is shown and compared.
        words: for some of them, the only values there are.
    """

    def __init__(
        self, runs: Iterable[RunState], fixed: Mapping[str, Getter], words: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._runs = list(runs)
        self._fixed = fixed
        self._words = words or {}

    def find(self, name: str) -> Column:
        """Return a column by its name.

        Raises:
            UsageError: when no run has such a column, with the nearest name.
        """
        if name in self._fixed:
            return Column(name, self._fixed[name], self._fixed[name])
        if name in self._metrics:
            return self._metrics[name]
        if name in self._keys:
            return Column(name, lambda run: self._flat(run).get(name), lambda run: self._flat(run).get(name))
        known = [*self._fixed, *self._metrics, *self._keys]
        hint = f"columns: {', '.join(self._fixed)}, a metric such as reward or accuracy_gain.low, or a config key"
        raise UsageError(f"no column {name[:80]!r}", did_you_mean(name, known, hint))

    def condition(self, text: str) -> Condition:
        """Read a condition such as `reward>0.2`.

        Raises:
            UsageError: when it is none, names no column, or a value that the column never has.
        """
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise UsageError(f"{text[:80]!r} is no condition", _EXAMPLE)
        column, operator = self.find(match[1]), "=" if match[2] == "==" else match[2]
        words = self._words.get(column.name)
        if words and operator in ("=", "!=") and match[3] not in words:
            raise UsageError(
                f"no {column.name} {match[3][:80]!r}", did_you_mean(match[3], words, f"one of {', '.join(words)}")
            )
        self._single(column)
        return Condition(column, operator, match[3])

    def ordered(self, runs: Sequence[RunState], keys: str) -> list[RunState]:
        """Sort by columns separated by commas, `-` before a name for descending; runs without a value come last.

        By a held-out metric, runs whose number was taken under another protocol, and then imported ones, come after
        those that compare: an order over all of them would name a best run that nothing shows to be better.

        Raises:
            UsageError: for an unknown column.
        """
        result = list(runs)
        for key in reversed([key.strip() for key in keys.split(",") if key.strip()]):
            column = self.find(key.lstrip("-"))
            self._single(column)
            values = [(sort_key(column.value(run)), run) for run in result]
            present = [(value, run) for value, run in values if value is not None]
            present.sort(key=itemgetter(0), reverse=key.startswith("-"))
            present.sort(key=lambda pair: self._rank(column, pair[1]))  # stable
            result = [run for _, run in present] + [run for value, run in values if value is None]
        return result

    def incomparable(self, runs: Sequence[RunState], keys: str) -> list[str]:
        """Return those of the runs whose value of the first held-out metric among `keys` was measured otherwise.

        Args:
            runs: of the list that is shown.
            keys: as `ordered` takes them.
        """
        columns = [self.find(key.strip().lstrip("-")) for key in keys.split(",") if key.strip()]
        column = next((column for column in columns if column.env), None)
        return [] if column is None else [run.run for run in runs if self._rank(column, run)]

    def _rank(self, column: Column, run: RunState) -> int:
        """Return how far a run's value of a column is from comparing: 0, 1 (other protocol) or 2 (other system)."""
        data = self._last[run.run].get(column.env) if column.env else None
        if column.env is None or data is None or protocol_of(run, data) == self._protocols.get(column.env):
            return 0
        return 2 if run.kind == "import" else 1

    def _single(self, column: Column) -> None:
        """Refuse to compare a metric that means something else in each environment."""
        if column.name in self._metrics and column.value is _ambiguous:
            choices = [f"{column.name}.{env}" for env in self._envs]
            raise UsageError(f"{column.name} has a value per environment", f"name one: {', '.join(choices)}")

    @cached_property
    def _last(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {run.run: last_policy_evals(run) for run in self._runs}

    @cached_property
    def _protocols(self) -> dict[str, str]:
        return reference_protocols(self._runs)

    @cached_property
    def _envs(self) -> list[str]:
        return sorted({env for evals in self._last.values() for env in evals})

    @cached_property
    def _metrics(self) -> dict[str, Column]:
        """Every spelling of every metric: NAME, NAME.ENV, NAME.low, NAME.ENV.low; gains end in `_gain`."""
        names = {"reward"} | {name for evals in self._last.values() for data in evals.values() for name in means(data)}
        found: dict[str, Column] = {}
        for metric in sorted(names, key=lambda name: (name != "reward", name)):
            for member in ("means", "gain"):
                name = metric if member == "means" else "gain" if metric == "reward" else f"{metric}_gain"
                for column in self._spellings(name, member, metric):
                    found.setdefault(column.name, column)
        return found

    def _spellings(self, name: str, member: str, metric: str) -> list[Column]:
        gain = member == "gain"

        def interval(env: str, bound: str = "") -> Getter:
            def get(run: RunState) -> Any:
                found = means(self._last[run.run].get(env, {}), member).get(metric)
                return found if not bound or found is None else number_or_none(found.get(bound))

            return get

        def by_env(run: RunState) -> dict[str, Any]:
            return {env: interval(env)(run) for env in self._last[run.run]}

        only = self._envs[0] if len(self._envs) == 1 else None
        value = _absent if not self._envs else _ambiguous if only is None else interval(only, "mean")
        columns = [Column(name, by_env, value, gain, only)]
        for env in self._envs:
            columns.append(Column(f"{name}.{env}", interval(env), interval(env, "mean"), gain, env))
            for bound in _BOUNDS:
                spellings = [f"{name}.{env}.{bound}"] + [f"{name}.{bound}"] * (only is not None)
                columns += [Column(text, interval(env, bound), interval(env, bound), gain, env) for text in spellings]
        if not self._envs:
            columns += [Column(f"{name}.{bound}", _absent, _absent, gain) for bound in _BOUNDS]
        return columns

    @cached_property
    def _configs(self) -> dict[str, dict[str, Any]]:
        return {}

    def _flat(self, run: RunState) -> dict[str, Any]:
        if run.run not in self._configs:
            final = run.created.get("final")
            self._configs[run.run] = flat_config(run_config(run)) | (final if isinstance(final, dict) else {})
        return self._configs[run.run]

    @cached_property
    def _keys(self) -> set[str]:
        return {key for run in self._runs for key in self._flat(run)}


def means(data: Mapping[str, Any], member: str = "means") -> dict[str, Mapping[str, Any]]:
    """Return the intervals of an eval by metric, `means` or `gain`; what is no interval is left out."""
    found = data.get(member)
    if not isinstance(found, Mapping):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, Mapping)}


def _ambiguous(_run: RunState) -> None:
    """Stand for the value of a metric that has one per environment."""


def _absent(_run: RunState) -> None:
    """Stand for the value of a metric that no run has."""


def sort_key(value: Any) -> tuple[int, Any, str] | None:
    """Return what a value sorts by: numbers before text, run ids by their number; None when there is no value."""
    if value is None or value == "" or value == []:
        return None
    number = number_or_none(value)
    if number is not None:
        return None if number != number else (0, number, "")
    if isinstance(value, bool):
        return (0, int(value), "")
    text = _spelt(value)
    run = re.fullmatch(r"run-([0-9]{3,9})", text)
    return (1, int(run[1]), "") if run else (2, 0, text)
