"""The report of a prompt search, and the section on what a prompt and RL each gave."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from markdown_it import MarkdownIt

from harness.core.errors import ConfigError
from harness.evaluation.effect import CELLS, EFFECTS, prompt_effects
from harness.evaluation.statistics import mean_of
from harness.evaluation.summary import interval_json
from harness.reports.html import render_html
from harness.reports.markdown import render_markdown
from harness.reports.model import Estimate
from harness.reports.search import example_blocks, search_blocks
from harness.reports.search_model import RECORD, read_search
from harness.reports.search_plots import MOST_CANDIDATES, drawn, search_plots
from harness.reports.write import build_report, check_report, write_report
from tests.evaluation.test_effect import world
from tests.payloads import PAYLOADS
from tests.reports.reports_synthetic import ENV, RUN, Recorder
from tests.reports.search_synthetic import SEARCH_RUN, search_record, write_search
from tests.reports.test_reports_hostile import Page, poison


def text_of(program, name="report.md"):
    return build_report(program, SEARCH_RUN)[name].decode()


def test_it_says_what_was_found_how_and_what_it_changed(program):
    write_search(program)
    files = build_report(program, SEARCH_RUN)
    assert {name for name in files if name.startswith("plots/")} == {
        *("plots/candidates.png", "plots/budget.png", "plots/wins.png")
    }
    page = files["report.md"].decode()
    assert "found-44444444" in page and "candidate 4 of 6 validated" in page and "it holds" in page
    assert "400 of 400" in page and "0.25 of 2" in page
    # the tree
    assert "└─ 2  0." in page and "   ├─ 4  0." in page and "system  chosen" in page
    # the diff
    assert "-Answer.\n+Answer with one letter." in page and "-b\n+d" in page
    assert "train-17, train-42" in page
    assert "system lacks" in page and "5 accepted, 1 rejected, 1 refused" in page
    examples = files["rollouts.md"].decode()
    assert "validation-001" in examples and "0.000 → 1.000" in examples and "<think>so</think>A" in examples
    assert "Rollouts" not in page and "Gates" not in page


def test_numbers_are_those_of_the_record(program):
    write_search(program)
    gain = search_record()["scoring"]["gain"]["seed"]["reward"]
    expected = f"{gain['mean']:+.3f}** ({gain['low']:+.3f} to {gain['high']:+.3f})"
    assert expected.replace("-", "−") in text_of(program)


def test_wins_are_counted_by_task(program):
    found = read_search(_bytes(search_record()), [], 0.95)
    best = found.found
    assert best.gain is not None and best.gain.mean == pytest.approx(best.mean.mean - found.seed.mean.mean)
    scores = {task: [c.scores[task] for c in found.candidates] for task in found.seed.scores}
    for candidate in found.candidates:
        top = [row[candidate.index] == max(row) > min(row) for row in scores.values()]
        alone = [hit and row.count(max(row)) == 1 for hit, row in zip(top, scores.values(), strict=True)]
        assert (candidate.best, candidate.alone) == (sum(top), sum(alone))


def _bytes(record):
    from harness.core.canonical import canonical_json

    return canonical_json(record, sort=False).encode()


def test_plots_are_drawn_to_the_same_bytes():
    found = read_search(_bytes(search_record()), [], 0.95)
    assert search_plots(found, 0.95) == search_plots(found, 0.95)


def test_the_same_bytes_and_check_notices_every_change(program):
    write_search(program)
    write_report(program, SEARCH_RUN)
    assert check_report(program, SEARCH_RUN) == []
    Recorder(program, SEARCH_RUN).add("noted", {"text": "looked at it"})
    assert "report.md is stale" in check_report(program, SEARCH_RUN)
    write_report(program, SEARCH_RUN)
    record = program.analysis_dir(SEARCH_RUN) / RECORD
    record.write_bytes(record.read_bytes() + b"\n")
    assert "report.md is stale" in check_report(program, SEARCH_RUN)
    assert "is not the one the ledger names" in text_of(program)


def test_a_search_that_runs_or_was_killed_has_a_report_too(program):
    write_search(program, ended=False)
    page = text_of(program)
    assert "has not ended" in page and "plots/" not in page


def test_a_seed_that_nothing_beats_is_said_to_be_chosen(program):
    record = search_record()
    write_search(program, chosen=0, history=record["history"][:1], steps=[], examples=[])
    page = text_of(program)
    assert "the seed prompt was chosen, unchanged" in page and "the seed prompt itself of 1 validated" in page
    assert "No examples are on record." in text_of(program, "rollouts.md")


@pytest.mark.parametrize("name", ["history", "clusters", "scoring", "steps", "sizes", "chosen"])
def test_a_record_that_lacks_something_is_an_error_with_a_hint(name):
    record = search_record()
    del record[name]
    with pytest.raises(ConfigError, match="no record of a prompt search"):
        read_search(_bytes(record), [], 0.95)


def test_plots_have_room_for_the_best_of_many_candidates():
    record = search_record()
    many = [{**record["history"][1], "index": index} for index in range(6, 60)]
    found = read_search(_bytes(record | {"history": record["history"] + many}), [], 0.95)
    shown = drawn(found)
    assert len(shown) == MOST_CANDIDATES and {0, 4} <= {candidate.index for candidate in shown}


def test_hostile_text_stays_text(program):
    write_search(program)
    state = _data(program)
    plots = _plots(state)
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def parse(data):
        blocks = [*search_blocks(data, plots), *example_blocks(data)]
        page = Page()
        page.feed(render_html("t", blocks, {f"plots/{name}.png": b"png" for name in plots}))
        tokens = [t for token in parser.parse(render_markdown(blocks)) for t in (token, *(token.children or []))]
        targets = {str(value) for t in tokens for key, value in t.attrs.items() if key in ("href", "src")}
        return page, Counter(token.type for token in tokens), targets

    clean, _, targets = parse(_poisoned(state, "plain"))
    for payload in PAYLOADS:
        page, counts, found = parse(_poisoned(state, payload))
        assert set(page.elements) <= set(clean.elements) and page.comments == [], payload
        assert not [a for a in page.attributes if a[1].startswith("on")], payload
        assert not counts["html_block"] + counts["html_inline"] + counts["em_open"], payload
        assert found == targets, payload


def _data(program):
    from harness.ledger import Ledger
    from harness.program import read_context, read_goal
    from harness.reports.collect import collect
    from harness.reports.model import Metrics

    state = Ledger(program.ledger).state().runs[SEARCH_RUN]
    search = read_search((program.analysis_dir(SEARCH_RUN) / RECORD).read_bytes(), state.attempts, 0.95)
    pages = (read_goal(program), read_context(program))
    return collect(program.root, state, *pages, metrics=Metrics(), samples=(), summary={}, search=search)


def _plots(data):
    return search_plots(data.search, 0.95)


def _poisoned(data, payload):
    """Poison every text that is shown; names of tasks and of compared prompts are keys and stay."""
    search = data.search
    candidates = tuple(
        dataclasses.replace(
            candidate,
            texts={name: payload + text for name, text in candidate.texts.items()},
            changed=tuple(payload for _ in candidate.changed),
        )
        for candidate in search.candidates
    )
    bad = poison(dataclasses.replace(search, candidates=(), parts={}, sizes={}), payload)
    bad = dataclasses.replace(bad, candidates=candidates, parts=search.parts, sizes=search.sizes)
    return dataclasses.replace(
        poison(dataclasses.replace(data, search=None, evals=()), payload), search=bad, kind=data.kind
    )


def effect_event():
    """Return the data of a `prompt_effect` event, from simulated evals."""
    cells = world({cell: 0.2 + 0.12 * number for number, cell in enumerate(CELLS)}, 120, 40)
    effects = {name: interval_json(value) for name, value in prompt_effects(cells).items()}
    return {
        "env": ENV,
        "seed_run": "run-001",
        "chosen_run": RUN,
        "confidence": 0.95,
        "cells": [
            {"model": model, "prompt": prompt, "means": {"reward": interval_json(mean_of(cells[model, prompt]))}}
            for model, prompt in CELLS
        ],
        "effects": {"reward": effects},
        "verdict": {"reward": "kept"},
        "differs": ["train.seed"],
    }


def test_the_effect_of_a_prompt_has_a_section_in_the_report_of_its_run(trained):
    assert "Prompt and RL" not in build_report(trained, RUN)["report.md"].decode()
    data = effect_event()
    Recorder(trained, RUN).add("prompt_effect", data)
    page = build_report(trained, RUN)["report.md"].decode()
    section = page[page.index("## Prompt and RL") :]
    assert "**kept**: The prompt's gain is there before RL and after it" in section.replace("\\", "")
    for effect in EFFECTS:
        assert effect.title in section
        value = Estimate.read(data["effects"]["reward"][effect.name])
        assert f"{value.mean:+.3f}".replace("-", "−") in section
    assert "run-001" in section and "train.seed" in section and "120 held-out items in 40 clusters" in section
