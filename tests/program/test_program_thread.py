"""THREAD.md and amendments, from a real ledger."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from harness.core.errors import ConfigError, NotFoundError, RefusedError, UsageError
from harness.ledger import Ledger, fold
from harness.program import Program, init_program, protocol_hashes, render_thread, unamended
from harness.program.amend import amend, check_amended
from harness.program.thread import BEGIN, END, best_runs, replace_block, thread_block

EVIL = (
    "</td><script>alert(1)</script> | `x` <!-- harness:end --> @all #1 [a](http://e) ![i](http://e)"
    "\n## forged\n\x1b[31m\u202e"
)

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


@pytest.fixture
def program(tmp_path):
    init_program(tmp_path / "prog", git=False)
    return Program(tmp_path / "prog")


@pytest.fixture
def ledger(program):
    return Ledger(program.ledger)


def create(ledger, program, run, hypothesis="h", **more):
    data = {"type": "training", "hypothesis": hypothesis, "parent": None, "protocol": protocol_hashes(program)}
    ledger.append(run, "created", data | more)


def evaluate(ledger, run, step, mean, subject="policy", prompt="run", env="drugprot"):
    stats = {"mean": mean, "low": mean - 0.02, "high": mean + 0.02}
    data = {"attempt": 1, "subject": subject, "step": step, "env": env, "prompt": prompt, "means": {"reward": stats}}
    ledger.append(run, "evaluated", data | {"gain": {"reward": {"mean": 0.1, "low": 0.05, "high": 0.15}}})


def start(ledger, run, outcome="completed"):
    ledger.append(run, "started", {"attempt": 1})
    if outcome:
        ledger.append(run, "finished", {"attempt": 1, "outcome": outcome})


def test_an_empty_program(program, ledger):
    assert not render_thread(program, ledger.state())  # init has done it
    text = program.thread.read_text()
    assert "no run has been promoted" in text and "No runs yet" in text


def test_the_block_tells_where_we_stand(program, ledger):
    create(ledger, program, "run-001", "Defaults learn")
    start(ledger, "run-001")
    evaluate(ledger, "run-001", 0, 0.1, subject="base")
    evaluate(ledger, "run-001", 10, 0.25)
    evaluate(ledger, "run-001", 30, 0.3)
    evaluate(ledger, "run-001", 30, 0.9, prompt="shipped")
    ledger.append("run-001", "decided", {"decision": "keep", "reason": "clear gain"})
    create(ledger, program, "run-002", "Alpha 64 learns faster")
    start(ledger, "run-002")
    evaluate(ledger, "run-002", 30, 0.4)
    ledger.append("run-002", "decided", {"decision": "reject", "reason": "collapsed"})
    create(ledger, program, "run-003", "Rank 32 helps")
    start(ledger, "run-003", outcome=None)
    block = thread_block(ledger.state())
    assert "**run-001**, Defaults learn" in block
    assert "reward 0.300 [0.280, 0.320], gain over base 0.100 [0.050, 0.150]" in block
    assert block.index("| run-002 | reject | Alpha 64 learns faster | collapsed |") < block.index("| run-001 | keep |")
    assert "| run-003 | running | Rank 32 helps |" in block
    assert "- completed: 2 (run-001, run-002)" in block
    (best,) = best_runs(ledger.state()).values()
    assert (best[0].run, best[1].mean, best[2]) == ("run-001", 0.3, 2)
    ledger.append("run-001", "promoted", {"verdict": "pass", "gates": []})
    assert "Champion: **run-001**, Defaults learn (promoted 20" in thread_block(ledger.state())


def test_numbers_that_are_none_do_not_break_the_page(program, ledger):
    create(ledger, program, "run-001")
    nan = float("nan")
    means = {"reward": {"mean": nan, "low": nan, "high": nan}}
    for data in (
        {"subject": "policy", "step": 1, "env": "drugprot", "means": means},
        {"subject": "policy", "step": 2, "env": "drugprot"},
        {"subject": "policy", "step": 3, "env": "drugprot", "means": {"reward": None}},
    ):
        ledger.append("run-001", "evaluated", data)
        assert thread_block(ledger.state())
    assert best_runs(ledger.state()) == {}


def test_the_same_events_in_any_order_give_the_same_bytes(program, ledger):
    for number in range(1, 6):
        create(ledger, program, f"run-00{number}", f"h{number}")
        ledger.append(f"run-00{number}", "decided", {"decision": "keep", "reason": f"r{number}"})
    events = ledger.events()
    assert thread_block(fold(events)) == thread_block(fold(events[::-1]))


def test_free_text_stays_byte_for_byte(program, ledger):
    free = f"# Mine \r\n\ntab\there\n{BEGIN}\nold\n{END}\n\ntrailing  \n\n\nno newline at the end"
    program.thread.write_bytes(free.encode())
    render_thread(program, ledger.state())
    text = program.thread.read_bytes().decode()
    before, after = free.split(f"{BEGIN}\nold\n{END}")
    assert text.startswith(before + BEGIN) and text.endswith(END + after)


def test_text_that_is_not_utf8_survives(program, ledger):
    program.thread.write_bytes(b"\xff\xfe notes\n" + f"{BEGIN}\n{END}\n".encode())
    render_thread(program, ledger.state())
    assert program.thread.read_bytes().startswith(b"\xff\xfe notes\n")


def test_a_missing_page_or_block_is_made(program, ledger):
    program.thread.unlink()
    render_thread(program, ledger.state())
    assert program.thread.read_text().startswith("# Thread\n")
    program.thread.write_text("only notes")
    render_thread(program, ledger.state())
    assert program.thread.read_text().startswith("only notes\n\n" + BEGIN)
    assert not render_thread(program, ledger.state())


@pytest.mark.parametrize("text", [f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n", END])
def test_broken_markers_are_refused(program, ledger, text):
    program.thread.write_text(text)
    with pytest.raises(ConfigError, match=r"THREAD\.md"):
        render_thread(program, ledger.state())
    assert program.thread.read_text() == text


def test_hostile_text_cannot_leave_its_cell(program, ledger):
    create(ledger, program, "run-001", EVIL)
    ledger.append("run-001", "decided", {"decision": "keep", "reason": EVIL})
    create(ledger, program, "run-002", EVIL)
    render_thread(program, ledger.state())
    text = program.thread.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    kinds = {child.type for token in MARKDOWN.parse(text) for child in token.children or []}
    assert kinds <= {"text", "text_special", "softbreak", "strong_open", "strong_close", "code_inline"}
    assert "\x1b" not in text and "\u202e" not in text and "@all" not in text
    assert "\n## forged" not in text
    rows = [line for line in text.splitlines() if line.startswith("| run-001")]
    assert [row.replace("\\|", "").count("|") for row in rows] == [6]
    assert not render_thread(program, ledger.state())


@given(st.text(alphabet="ab\n#", max_size=30), st.text(alphabet="xy\n|", max_size=20))
def test_replacing_twice_is_replacing_once(text, block):
    once = replace_block(text, block)
    assert replace_block(once, block) == once
    assert once.startswith(text)


def test_pages_may_move_until_the_first_run(program, ledger):
    program.goal.write_text(program.goal.read_text() + "\nMore prose.\n")
    assert unamended(program, ledger.state()) == []


def test_an_edit_must_be_recorded(program, ledger):
    create(ledger, program, "run-001")
    first = protocol_hashes(program)["goal"]
    program.goal.write_text(program.goal.read_text().replace("threshold = 0.20", "threshold = 0.25"))
    assert unamended(program, ledger.state()) == ["GOAL.md"]
    with pytest.raises(RefusedError, match=r"GOAL\.md changed") as caught:
        check_amended(program, ledger.state())
    assert "harness amend GOAL.md" in caught.value.hint
    event = amend(program, "goal", "  the bar was too low ")
    assert event.run == "program" and event.kind == "amended"
    assert event.data == {
        "file": "GOAL.md",
        "old_sha": first,
        "new_sha": protocol_hashes(program)["goal"],
        "reason": "the bar was too low",
    }
    assert unamended(program, ledger.state()) == []
    assert "the bar was too low" in thread_block(ledger.state())
    program.goal.write_text(program.goal.read_text().replace("threshold = 0.25", "threshold = 0.20"))
    assert unamended(program, ledger.state()) == ["GOAL.md"]


def test_a_later_run_of_another_branch_does_not_undo_an_amendment(program, ledger):
    create(ledger, program, "run-001")
    old = protocol_hashes(program)
    program.context.write_text(program.context.read_text() + "\n")
    amend(program, "CONTEXT.md", "a note")
    ledger.append("run-002", "created", {"type": "training", "hypothesis": "h", "protocol": old})
    assert unamended(program, ledger.state()) == []


@pytest.mark.parametrize(
    ("file", "reason", "error", "message"),
    [
        ("THREAD.md", "x", UsageError, "not amended"),
        ("../GOAL.md", "x", UsageError, "not amended"),
        ("GOAL.md", "  ", UsageError, "needs a reason"),
        ("PLAN.md", "x", UsageError, "has not changed"),
    ],
)
def test_amend_refuses(program, ledger, file, reason, error, message):
    create(ledger, program, "run-001")
    before = program.ledger.read_bytes()
    with pytest.raises(error, match=message):
        amend(program, file, reason)
    assert program.ledger.read_bytes() == before


def test_a_broken_page_cannot_be_amended(program, ledger):
    create(ledger, program, "run-001")
    program.goal.write_text("# no block\n")
    with pytest.raises(ConfigError, match="no ```toml block"):
        amend(program, "GOAL.md", "x")
    program.goal.unlink()
    with pytest.raises(NotFoundError):
        amend(program, "GOAL.md", "x")
    assert [json.loads(line)["kind"] for line in program.ledger.read_text().splitlines()] == ["created"]


def test_the_best_run_of_each_environment_stands_alone(program, ledger):
    for number, (toy, drug, decision) in enumerate([(0.2, 0.5, None), (0.4, 0.3, None), (0.9, 0.9, "reject")], 1):
        run = f"run-00{number}"
        create(ledger, program, run, f"h{number}")
        start(ledger, run)
        evaluate(ledger, run, 5, toy, env="toy")
        evaluate(ledger, run, 5, drug)
        if decision:
            ledger.append(run, "decided", {"decision": decision, "reason": "it cheats"})
    ledger.append("run-004", "imported", {"type": "import", "hypothesis": "elsewhere"})
    evaluate(ledger, "run-004", 5, 0.99, env="toy")
    best = best_runs(ledger.state())
    assert {env: run.run for env, (run, *_) in best.items()} == {"drugprot": "run-001", "toy": "run-002"}
    block = thread_block(ledger.state())
    assert "- Best on drugprot of 3 evaluated: **run-001**, h1\n  - drugprot at step 5: reward 0.500" in block
    assert "- Best on toy of 3 evaluated: **run-002**, h2\n  - toy at step 5: reward 0.400" in block
    ledger.append("run-002", "promoted", {"verdict": "pass", "gates": []})
    assert "- Best on toy of 3 evaluated: the champion\n" in thread_block(ledger.state())


def measured(ledger, run, mean, **binding):
    stats = {"mean": mean, "low": mean - 0.02, "high": mean + 0.02}
    data = {
        "attempt": 1,
        "subject": "policy",
        "step": 5,
        "env": "drugprot",
        "prompt": "run",
        "means": {"reward": stats},
    }
    ledger.append(run, "evaluated", data | {"items_sha": "a", "verifier": "1", "protocol": {"samples": 1}} | binding)


@pytest.mark.parametrize("binding", [{"items_sha": "b"}, {"verifier": "2"}, {"protocol": {"samples": 4}}])
def test_a_run_of_another_protocol_is_counted_but_never_the_best(program, ledger, binding):
    for number, (mean, other) in enumerate([(0.9, binding), (0.4, {}), (0.3, {})], 1):
        create(ledger, program, f"run-00{number}", f"h{number}")
        start(ledger, f"run-00{number}")
        measured(ledger, f"run-00{number}", mean, **other)
    best = best_runs(ledger.state())["drugprot"]
    assert (best.run.run, best.tried, best.others) == ("run-002", 2, 1)
    block = thread_block(ledger.state())
    assert "- Best on drugprot of 2 evaluated (1 more under another protocol, not compared): **run-002**, h2" in block


def test_the_budget_counts_every_attempt_and_what_was_lost(program, ledger):
    create(ledger, program, "run-001")
    assert "Nothing: no run has been launched." in thread_block(ledger.state())
    ends: list[dict[str, Any]] = [
        {"outcome": "crashed", "failure": "infra", "wall_s": 60.0, "tokens": None, "sampled_tokens": 1000},
        {"outcome": "completed", "failure": None, "wall_s": 120.0, "tokens": 5000, "sampled_tokens": 4200},
    ]
    for attempt, end in enumerate(ends, 1):
        ledger.append("run-001", "started", {"attempt": attempt, "resumed_from": None if attempt == 1 else 2})
        ledger.append("run-001", "finished", {**end, "attempt": attempt})
    evaluate(ledger, "run-001", 0, 0.1, subject="base")
    evaluate(ledger, "run-001", 5, 0.3)
    block = thread_block(ledger.state())
    assert "- 2 attempts: 3.0 min of training and evaluation, 60 s of it in 1 that failed outside the model" in block
    assert "- 5,200 tokens sampled for training\n- 1 look at the held-out items" in block


def test_events_that_do_not_say_what_an_attempt_sampled_are_counted_by_their_sums(program, ledger):
    create(ledger, program, "run-001")
    for attempt, (resumed, tokens) in enumerate([(None, 100), (4, 250), (None, 80)], 1):
        ledger.append("run-001", "started", {"attempt": attempt, "resumed_from": resumed})
        ledger.append("run-001", "finished", {"attempt": attempt, "outcome": "stopped", "tokens": tokens})
    assert "- 330 tokens sampled" in thread_block(ledger.state())


def test_open_ideas_stand_in_the_block_newest_first(program, ledger):
    for number in range(7):
        ledger.append("program", "proposed", {"hypothesis": f"idea {number} {EVIL}", "because": "why not"})
    text = thread_block(ledger.state())
    assert [text.index(f"- idea {number} ") for number in (6, 5, 4, 3, 2)] == sorted(
        text.index(f"- idea {number} ") for number in (6, 5, 4, 3, 2)
    )
    assert "- 2 older ideas: `harness next` lists them" in text
    render_thread(program, ledger.state())
    page = program.thread.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert "\n## forged" not in page
