"""The content of a report, section by section, as blocks; the first screen answers what, why and whether."""

from __future__ import annotations

from collections.abc import Mapping

from harness.core.numbers import spell_duration
from harness.core.types import Verdict
from harness.reports.blocks import (
    Block,
    Bullets,
    Code,
    Figure,
    FileLink,
    Heading,
    Inline,
    Paragraph,
    Quote,
    Table,
    Tone,
    code,
    strong,
    text,
)
from harness.reports.effect import effect_blocks
from harness.reports.inline import estimate, number
from harness.reports.model import Eval, GateRow, ReportData, Sample, metric_order, reward_parts
from harness.reports.plots import Plot
from harness.reports.search_model import KIND as SEARCH
from harness.reports.warmstart import warm_start_blocks
from harness.reports.warn import top_answer_share

_VERDICT_TONES: Mapping[str, Tone] = {Verdict.PASS: "good", Verdict.FAIL: "bad", Verdict.CANNOT_TELL: "warn"}
_DECISION_TONES: Mapping[str, Tone] = {"keep": "good", "reject": "bad", "rerun": "warn", "retune": "warn"}
_KEY_PACKAGES = ("torch", "transformers", "peft", "vllm", "numpy", "scipy", "safetensors", "post-training-harness")


def report_blocks(data: ReportData, plots: Mapping[str, Plot]) -> list[Block]:
    """Return the report without its rollouts, most important first."""
    return [
        *_head(data),
        *_changes(data),
        *_heldout(data, plots),
        *_gates(data),
        *_warnings(data),
        *_curves(data, plots),
        *_by_label(data, plots),
        *_training(data, plots),
        *effect_blocks(data),
        *_failures(data),
        *attempt_blocks(data),
        *environment_blocks(data),
    ]


def rollout_blocks(data: ReportData) -> list[Block]:
    """Return the chosen rollouts with their verdicts, as text that cannot do anything."""
    if not data.samples:
        return [Heading(2, "Rollouts"), Paragraph(text("No rollouts were stored for this run."))]
    intro = (
        "Chosen by rule, not by hand: one rollout of the first stored step, then the best, the worst and random ones "
        "of the last stored step. The run's name seeds the choice."
    )
    blocks: list[Block] = [Heading(2, "Rollouts"), Paragraph(text(intro))]
    if any(sample.prompt is None for sample in data.samples):
        blocks.append(Paragraph(text("The prompts are left out: the source text may not be redistributed.")))
    for sample in data.samples:
        blocks += _sample(sample)
    return blocks


def decision_chips(data: ReportData) -> list[tuple[str, Tone]]:
    """Return the labels beside the title: decision, gate verdict, status."""
    decision = (data.decision or "no decision yet", _DECISION_TONES.get(data.decision, "quiet"))
    if data.kind == SEARCH:
        return [decision, (data.status, "quiet")]  # no gate judges a search
    gate_text = "promoted" if data.gates.promoted else f"gates: {_words(data.gates.verdict)}"
    return [decision, (gate_text, _VERDICT_TONES.get(data.gates.verdict, "quiet")), (data.status, "quiet")]


def _words(name: str) -> str:
    return name.replace("_", " ")


def decision_line(data: ReportData) -> Inline:
    """Return what was decided, by whom and why."""
    if not data.decision:
        return text("none yet", "quiet")
    decision = strong(data.decision, _DECISION_TONES.get(data.decision, ""))
    if data.decided_by or data.reason:
        by = f" by {data.decided_by}" if data.decided_by else ""
        decision += text(f"{by}: {data.reason}" if data.reason else by)
    return decision


def _head(data: ReportData) -> list[Block]:
    verdict = strong(_words(data.gates.verdict), _VERDICT_TONES.get(data.gates.verdict, "quiet"))
    if data.gates.promoted:
        verdict += text(", promoted")
    elif not data.gates.recorded:
        verdict = text("not run", "quiet")
    rows: list[tuple[Inline, Inline]] = [(text("Decision"), decision_line(data)), (text("Gates"), verdict)]
    rows += [(text(f"Held-out, {env}"), _headline(data, env)) for env in data.eval_environments()]
    basis = code(data.parent) if data.parent else text("none, the first of its line")
    if data.replicate_of:
        basis += text(" · replicates ") + code(data.replicate_of)
    rows += [(text("Parent"), basis), (text("Status"), text(data.status))]
    if data.config:
        rows.append((text("Config"), code(data.config)))
    if data.provenance:
        rows.append((text("Provenance"), text(data.provenance)))
    if data.warnings:
        rows.append((text("Warnings"), strong(f"{len(data.warnings)}, listed below", "warn")))
    return [
        Heading(1, data.run),
        Quote(data.hypothesis or "No hypothesis is recorded."),
        Table(("", ""), tuple(rows)),
    ]


def _headline(data: ReportData, env: str) -> Inline:
    final, base = data.final(env), data.base(env)
    if final is None:
        return text("no eval of the policy", "quiet")
    parts: Inline = ()
    for name in ("reward", "accuracy"):
        if name in final.means:
            before = f"{number(base.means[name].mean)} → " if base and name in base.means else ""
            gain = final.gain.get(name)
            parts += text(f"{' · ' if parts else ''}{name} {before}{number(final.means[name].mean)}")
            if gain is not None:
                parts += (*text(", gain "), *estimate(gain, signed=True))
    warm = data.warm_start(env)
    if warm and "accuracy" in warm.gain:
        parts += (*text(" · accuracy over its own warm start "), *estimate(warm.gain["accuracy"], signed=True))
    return parts or text("no finite metric", "warn")


def _changes(data: ReportData) -> list[Block]:
    blocks: list[Block] = [Heading(2, "Change")]
    if data.lever:
        blocks.append(Paragraph(text("One lever, declared as ") + code(data.lever) + text(".")))
    if not data.changes:
        return [*blocks, Paragraph(text("No change to the parent." if data.parent else "No parent to differ from."))]
    rows = tuple(
        (
            code(c.key),
            code(c.old),
            code(c.new),
            text(c.kind),
            text("yes" if c.counts else "no", "" if c.counts else "quiet"),
        )
        for c in data.changes
    )
    return [*blocks, Table(("Key", "Parent", "This run", "Kind", "Counts"), rows)]


def _heldout(data: ReportData, plots: Mapping[str, Plot]) -> list[Block]:
    blocks: list[Block] = [Heading(2, "Held-out result")]
    if not data.evals:
        return [*blocks, Paragraph(text("No held-out eval is recorded."))]
    for env in data.eval_environments():
        shown = data.final(env) or data.base(env)
        if shown is None:
            continue
        blocks.append(Heading(3, env))
        blocks.append(Paragraph(text(_eval_line(data, shown))))
        blocks.append(_means(data, env, shown))
        blocks += warm_start_blocks(data, env)
        blocks += _parts(data, env)
        blocks += _baselines(data, env)
        blocks += figure(plots, f"gain-{env}")
    return blocks


def _eval_line(data: ReportData, shown: Eval) -> str:
    who = f"Policy after step {shown.step}" if shown.subject == "policy" else "Base model"
    if shown.n is None:
        asked = "" if shown.requested is None else f", {shown.requested} of them asked for"
        return f"{who}, as the source states it: its items are not known{asked}, so there is no interval."
    line = (
        f"{who}, {shown.n} of {shown.requested} items counted; means with {data.confidence:.0%} intervals, "
        "gains paired on the same items."
    )
    share = top_answer_share(shown)
    return line if share is None else f"{line} Most frequent answer: {share:.0%} of the answers."


def _means(data: ReportData, env: str, shown: Eval) -> Table:
    """Return means and gains; the shipped prompt has columns of its own only where the run has another one."""
    final, base, shipped = data.final(env), data.base(env), data.base(env, "shipped")
    evals = {"Base, shipped prompt": shipped, "Base, run prompt": base, "Policy": final}
    gains = {
        "Gain over run prompt": final.gain if final else {},
        "Gain over shipped prompt": final.gain_shipped if final else {},
    }
    if shipped is None and final is not None and final.gain == final.gain_shipped:
        evals = {"Base": base, "Policy": final}
        gains = {"Gain": final.gain}
    judged = reward_parts(shown.means, data, env)
    rows = tuple(
        (
            text(name),
            *(estimate(entry.means.get(name) if entry else None) for entry in evals.values()),
            *(estimate(gain.get(name), signed=True, judged=name in judged) for gain in gains.values()),
        )
        for name in metric_order(shown.means)
    )
    return Table(("Metric", *evals, *gains), rows, frozenset(range(1, 1 + len(evals) + len(gains))))


def _parts(data: ReportData, env: str) -> list[Block]:
    rows = tuple(
        (text(row.metric), text(str(row.n)), *(text("—" if v is None else number(v)) for v in (row.base, row.policy)))
        for row in data.parts
        if row.env == env
    )
    if not rows:
        return []
    return [
        Paragraph(text("Metrics of a part of the items, or of the set as a whole, without intervals:")),
        Table(("Metric", "Items", "Base", "Policy"), rows, frozenset({1, 2, 3})),
    ]


def _baselines(data: ReportData, env: str) -> list[Block]:
    found = [row for row in data.baselines if row.env == env]
    if not found:
        return []
    said = Paragraph(text("Answers without a model on the same items, to hold the numbers against:"))
    names, metrics = (list(dict.fromkeys(column)) for column in zip(*((r.name, r.metric) for r in found), strict=True))
    if len(metrics) == 1:
        rows = tuple((text(row.name), text(row.metric), text(number(row.value))) for row in found)
        return [said, Table(("Baseline", "Metric", "Value"), rows, frozenset({2}))]
    values = {(row.metric, row.name): number(row.value) for row in found}
    wide = tuple((text(m), *(text(values.get((m, name), "—")) for name in names)) for m in metrics)
    return [said, Table(("Metric", *names), wide, frozenset(range(1, 1 + len(names))))]


def _gates(data: ReportData) -> list[Block]:
    blocks: list[Block] = [Heading(2, "Gates")]
    if data.provenance:
        note = "An imported run is never promoted: its numbers come from another system. Replicate it here to judge it."
        return [*blocks, Paragraph(text(note))]
    if not data.gates.recorded:
        note = "promote has not judged this run; the table shows the bar of GOAL.md beside what was measured."
        blocks.append(Paragraph(text(note)))
    elif data.gates.step is not None:
        chosen = ", after GOAL.md or CONTEXT.md was amended" if data.gates.post_hoc else ""
        blocks.append(Paragraph(text(f"Judged at step {data.gates.step}{chosen}.")))
    if not data.gates.rows:
        return [*blocks, Paragraph(text("No gate has a row for this run."))]
    rows = tuple(_gate_row(row) for row in data.gates.rows)
    columns = ("Gate", "Environment", "Check", "Metric", "Measured", "Bound", "Verdict", "Detail")
    return [*blocks, Table(columns, rows, frozenset({4, 5}))]


def _gate_row(row: GateRow) -> tuple[Inline, ...]:
    tone = _VERDICT_TONES.get(row.verdict, "quiet")
    verdict = strong(_words(row.verdict), tone) if row.verdict != Verdict.NOT_RUN else text("not run", "quiet")
    plain = (row.gate, row.env, row.check, row.metric, row.value, row.bound)
    return (*(text(cell) for cell in plain), verdict, text(row.detail))


def _warnings(data: ReportData) -> list[Block]:
    if not data.warnings:
        looked = "None: no sign of collapse, evals complete, nothing left out."
        blind = "None to give: no held-out items are on record, so there was nothing to look at."
        judged = any(entry.requested for entry in data.evals)
        return [Heading(2, "Warnings"), Paragraph(text(looked if judged else blind))]
    return [Heading(2, "Warnings"), Bullets(tuple(text(warning) for warning in data.warnings), "warn")]


def figure(plots: Mapping[str, Plot], name: str) -> list[Block]:
    """Return a plot by its name; nothing when there is none."""
    plot = plots.get(name)
    return [Figure(f"plots/{plot.name}.png", plot.alt, plot.caption)] if plot else []


def _curves(data: ReportData, plots: Mapping[str, Plot]) -> list[Block]:
    blocks: list[Block] = []
    for env in data.eval_environments():
        blocks += figure(plots, f"heldout-{env}")
        points = data.curve(env)
        names = reward_parts({name for point in points for name in point.means}, data, env)[:4]
        if len(points) > 1:
            rows = tuple(
                (
                    text("base" if p.subject == "base" else str(p.step) if p.step else "0, warm start"),
                    text("—" if p.n is None else str(p.n)),
                    *(estimate(p.means.get(n)) for n in names),
                )
                for p in points
            )
            blocks.append(Table(("Step", "Items", *names), rows, frozenset(range(1, 2 + len(names)))))
    return [Heading(2, "Held-out curves"), *blocks] if blocks else []


def _by_label(data: ReportData, plots: Mapping[str, Plot]) -> list[Block]:
    blocks: list[Block] = []
    for env in sorted({row.env for row in data.labels}):
        rows = tuple(
            (
                text(row.label),
                text(str(row.n)),
                text(_share(row.base)),
                text(_share(row.policy)),
                text(_change(row.base, row.policy)),
            )
            for row in data.labels
            if row.env == env
        )
        blocks += [Heading(3, env), *figure(plots, f"labels-{env}")]
        blocks.append(Table(("Label", "Answers", "Base", "Policy", "Change"), rows, frozenset(range(1, 5))))
    return [Heading(2, "Accuracy by label"), *blocks] if blocks else []


def _share(value: float | None) -> str:
    return "—" if value is None else f"{value:.1%}"


def _change(base: float | None, policy: float | None) -> str:
    return "—" if base is None or policy is None else f"{100 * (policy - base):+.1f} points".replace("-", "−")


def _training(data: ReportData, plots: Mapping[str, Plot]) -> list[Block]:
    if not data.metrics.steps:
        return [Heading(2, "Training"), Paragraph(text("No training metrics are stored for this run."))]
    blocks: list[Block] = [Heading(2, "Training"), *figure(plots, "learning"), *figure(plots, "logged")]
    for env in data.metrics.environments():
        blocks += figure(plots, f"components-{env}")
    blocks += [*figure(plots, "rollouts"), *figure(plots, "optimisation")]
    return [*blocks, *_cost(data)]


def _cost(data: ReportData) -> list[Block]:
    """Return where a step's time goes: medians, which one slow step does not move."""
    keys = sorted(key for key in data.metrics.columns if key.startswith(("time/", "perf/")))
    rows = []
    for key in keys:
        values = sorted(data.metrics.series(key)[1])
        if values:
            middle = values[len(values) // 2]
            rows.append((code(key), text(f"{middle:.4g}"), text(f"{values[0]:.4g}"), text(f"{values[-1]:.4g}")))
    if not rows:
        return []
    return [
        Heading(3, "Cost per step"),
        Table(("Key", "Median", "Lowest", "Highest"), tuple(rows), frozenset({1, 2, 3})),
    ]


def _failures(data: ReportData) -> list[Block]:
    counts: dict[str, dict[str, int]] = {}
    for e in data.evals:
        counts[f"held-out {e.env}, {e.subject} step {e.step}, {e.prompt} prompt"] = dict(e.failures)
    prefix = "train/failures/"
    logged = [key for key in data.metrics.columns if key.startswith(prefix)]
    if logged:
        counts["training, all steps"] = {
            key.removeprefix(prefix): int(sum(data.metrics.series(key)[1])) for key in logged
        }
    classes = sorted({name for found in counts.values() for name, count in found.items() if count})
    if not classes:
        return [Heading(2, "Failures"), Paragraph(text("None recorded."))]
    note = (
        "Class model counts against the model (wrong, invalid, cut by its own length); "
        "every other class is left out of the mean."
    )
    rows = tuple((text(where), *(text(str(found.get(name, 0))) for name in classes)) for where, found in counts.items())
    table = Table(("Where", *classes), rows, frozenset(range(1, 1 + len(classes))))
    return [Heading(2, "Failures"), Paragraph(text(note)), table]


def attempt_blocks(data: ReportData) -> list[Block]:
    """Return how often the run was executed, and how each attempt ended."""
    if not data.attempts:
        told = "The run was not made here." if data.provenance else "The run has not been started."
        return [Heading(2, "Attempts"), Paragraph(text(told))]
    rows = tuple(
        (
            text(str(a.attempt)),
            text(a.outcome),
            text(" ".join(part for part in (a.failure, a.reason) if part) or "—"),
            text(a.resumed_from or "—"),
            text("—" if a.step is None else str(a.step)),
            text("—" if a.wall_s is None else spell_duration(a.wall_s)),
            text("—" if a.tokens is None else f"{a.tokens:,}"),
            text(a.host or "—"),
        )
        for a in data.attempts
    )
    columns = ("Attempt", "Outcome", "Failure", "Resumed from step", "Last step", "Duration", "Tokens", "Host")
    return [Heading(2, "Attempts"), Table(columns, rows, frozenset({4, 5, 6}))]


def environment_blocks(data: ReportData) -> list[Block]:
    """Return the captured machine, the files behind the numbers, and the notes."""
    rows = [(text(key), code(value)) for key, value in data.capture.items()]
    named = [name for name in _KEY_PACKAGES if name in data.packages]
    rows += [(text(name), code(data.packages[name])) for name in named]
    files = [(entry.file, entry.file_intact) for entry in data.evals if entry.file]
    blocks: list[Block] = [Heading(2, "Environment")]
    blocks.append(Table(("What", "Value"), tuple(rows)) if rows else Paragraph(text("Nothing was captured.")))
    if len(data.packages) > len(named):
        blocks.append(
            Paragraph(
                text(f"All {len(data.packages)} package versions are in ") + code("data/summary.json") + text(".")
            )
        )
    if files:
        words = {
            True: text("matches the ledger", "good"),
            False: text("missing or changed", "bad"),
            None: text("no hash", "quiet"),
        }
        blocks += [
            Heading(3, "Items behind the numbers"),
            Table(("File", "Hash"), tuple((code(file), words[intact]) for file, intact in sorted(set(files)))),
        ]
    if data.notes:
        blocks += [Heading(3, "Notes"), Bullets(tuple(text(note) for note in data.notes))]
    return blocks


def _sample(sample: Sample) -> list[Block]:
    verdict = "correct" if not sample.failure else f"failure class {sample.failure}"
    facts = [f"reward {number(sample.reward)}", verdict]
    if sample.advantage is not None:
        facts.append(f"advantage {number(sample.advantage, '+')}")
    if sample.tokens is not None:
        facts.append(f"{sample.tokens} tokens")
    if sample.finish:
        facts.append(f"finish {sample.finish}")
    blocks: list[Block] = [
        Heading(3, f"{sample.env}, step {sample.step}, {sample.pick}"),
        Paragraph(text("Task ") + code(sample.task) + text(" · " + " · ".join(facts))),
    ]
    if sample.components:
        parts = ", ".join(f"{name} {number(value)}" for name, value in sample.components.items())
        blocks.append(Paragraph(text(f"Components: {parts}")))
    if sample.diagnostics:
        blocks.append(Paragraph(text("Verifier: " + "; ".join(f"{k}: {v}" for k, v in sample.diagnostics.items()))))
    if sample.prompt is not None:
        blocks.append(Code(sample.prompt, "Prompt"))
    blocks.append(Code(sample.completion, "Completion"))
    return blocks


def rollout_link(data: ReportData) -> list[Block]:
    """Return the pointer from report.md to the rollouts."""
    if data.search is not None:
        count = len(data.search.examples)
        return [Heading(2, "Examples"), FileLink(f"{count} tasks before and after", "rollouts.md")] if count else []
    if not data.samples:
        return []
    return [Heading(2, "Rollouts"), FileLink(f"{len(data.samples)} sample rollouts with their verdicts", "rollouts.md")]
