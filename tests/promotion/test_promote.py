"""Promotion and decisions on a real program folder and ledger."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.canonical import content_sha, sha256_file
from harness.core.errors import CannotTellError, ExitCode, NotFoundError, UsageError
from harness.core.types import Verdict
from harness.ledger import Actor
from harness.program import protocol_hashes, read_context
from harness.promotion.promote import decide, promote
from harness.promotion.rules import PromotionRefusedError
from tests.promotion.promotion_world import GOAL, RUN, make_items


def heldout(world, **options):
    return promote(world.program, RUN, ["heldout"], **options)


def test_a_pass_writes_the_certificate_and_promotes(world):
    world.complete()
    outcome = heldout(world, actor=Actor("agent", "a"))
    assert (outcome.verdict, outcome.exit_code, outcome.promoted) == (Verdict.PASS, ExitCode.OK, True)
    assert world.kinds()[-2:] == ["gated", "promoted"]
    promoted = world.run.promoted
    path = world.program.root / promoted["certificate"]
    assert promoted["certificate"] == "analysis/run-001/certificate.json"
    assert promoted["certificate_sha"] == sha256_file(path) == outcome.certificate_sha
    assert (promoted["gates_asked"], promoted["actor"]["name"]) == (["heldout"], "a")
    assert world.ledger.state().champion == RUN
    json.dumps(outcome.to_json(), allow_nan=False)


def test_the_certificate_binds_what_was_judged_and_is_its_own_address(world):
    world.complete()
    outcome = heldout(world)
    certificate = json.loads((world.program.root / outcome.certificate).read_text())
    body = {key: value for key, value in certificate.items() if key != "id"}
    assert certificate["id"] == content_sha(body)
    assert (certificate["adapter_sha"], certificate["config_sha"], certificate["step"]) == ("A20", "c0", 20)
    hashes = protocol_hashes(world.program)
    assert certificate["protocol"] == {"goal": hashes["goal"], "context": hashes["context"]}
    files = {entry["subject"]: entry for entry in certificate["evals"]}
    assert set(files) == {"base", "policy"}
    for entry in files.values():
        assert entry["file_sha"] == sha256_file(world.program.root / entry["file"])
        assert entry["items_sha"] == "I"
    assert [row["check"] for row in certificate["gates"][0]["checks"]] == ["evidence", "threshold", "gain", "not_below"]
    assert certificate["gates_asked"] == ["heldout"]


def test_an_eval_under_the_prompt_of_another_run_is_no_evidence(world):
    world.complete()
    world.evaluate("policy", make_items(0), prompt="run-007", adapter_sha="A20")  # later, and much worse
    assert heldout(world).promoted


def test_promoting_again_on_the_same_evidence_keeps_the_same_certificate(world):
    world.complete()
    first, second = heldout(world), heldout(world)
    assert first.certificate_sha == second.certificate_sha and second.promoted
    assert world.kinds().count("promoted") == 1


def test_a_dry_run_gives_the_verdict_and_touches_nothing(world):
    world.complete()
    before = world.tree()
    outcome = heldout(world, dry_run=True)
    assert (outcome.verdict, outcome.promoted, outcome.dry_run) == (Verdict.PASS, False, True)
    assert world.tree() == before
    assert heldout(world).certificate_sha == outcome.certificate_sha


def test_a_fail_is_recorded_with_its_rows_and_nothing_is_promoted(world):
    world.complete(right=12)
    outcome = heldout(world)
    assert (outcome.verdict, outcome.exit_code) == (Verdict.FAIL, ExitCode.NO)
    assert any("below the threshold" in reason for reason in outcome.reasons)
    gated = world.run.gated[-1]
    assert gated["verdict"] == "fail" and gated["gates"][0]["checks"][1]["value"] == 0.3
    assert world.run.promoted is None and not (world.program.analysis_dir(RUN) / "certificate.json").exists()


def test_all_gates_cannot_tell_until_they_exist(world):
    world.complete()
    outcome = promote(world.program, RUN)
    assert (outcome.verdict, outcome.exit_code) == (Verdict.CANNOT_TELL, ExitCode.CANNOT_TELL)
    assert [(gate.name, gate.verdict) for gate in outcome.gates] == [
        ("heldout", Verdict.PASS),
        ("traces", Verdict.NOT_RUN),
        ("workflow", Verdict.NOT_RUN),
    ]
    assert world.run.gated[-1]["gates_asked"] == ["heldout", "traces", "workflow"]
    assert world.run.promoted is None


def test_a_failed_gate_is_a_no_even_if_others_were_not_run(world):
    assert promote(world.complete(right=12).program, RUN).exit_code is ExitCode.NO


@pytest.mark.parametrize(("gates", "says"), [(["heldot"], "no gate 'heldot'"), ([], "no gate was asked for")])
def test_unknown_gates_are_a_usage_error(world, gates, says):
    world.complete()
    with pytest.raises(UsageError, match=says) as caught:
        promote(world.program, RUN, gates)
    assert "heldout" in caught.value.hint


def test_an_unknown_run_is_not_found(world):
    world.complete()
    with pytest.raises(NotFoundError, match="run-009"):
        promote(world.program, "run-009", ["heldout"])


def test_a_nan_in_the_items_is_a_no(world):
    items = make_items(30)
    items[3] = replace(items[3], components={"accuracy": math.nan, "format": 1.0})
    world.create().start().evaluate("base", make_items(8), step=0).evaluate("policy", items).finish()
    outcome = heldout(world)
    assert outcome.exit_code is ExitCode.NO
    assert world.run.gated[-1]["gates"][0]["checks"][1]["value"] == {"$non_finite": "nan"}


def test_stored_means_are_not_believed(world):
    world.complete(right=12)
    lies = dict(world.run.evals[-1]["means"], accuracy={"mean": 0.99, "low": 0.98, "high": 1.0})
    world.evaluate("policy", make_items(12), means=lies, gain={"accuracy": {"mean": 0.9, "low": 0.8, "high": 1.0}})
    assert heldout(world).exit_code is ExitCode.NO


def damage(path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
    else:
        text = path.read_text()
        path.write_text(text.replace('"accuracy":0.0', '"accuracy":1.0', 1) if how == "changed" else text[:-20])


@pytest.mark.parametrize("subject", ["policy", "base"])
@pytest.mark.parametrize(
    ("how", "says"), [("removed", "cannot read"), ("changed", "was changed"), ("cut", "was changed")]
)
def test_a_changed_or_missing_item_file_cannot_tell(world, subject, how, says):
    world.complete()
    step = {"policy": 20, "base": 0}[subject]
    damage(world.program.analysis_dir(RUN) / "evals" / f"step_{step}.{subject}.e.jsonl", how)
    outcome = heldout(world)
    assert outcome.exit_code is ExitCode.CANNOT_TELL
    assert any(says in reason and f"step_{step}.{subject}.e.jsonl" in reason for reason in outcome.reasons)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"file": "../outside.jsonl"}, "outside analysis/"),
        ({"file": "GOAL.md"}, "outside analysis/"),
        ({"n": 39}, "40 counted samples, its event says 39"),
        ({"means": {"reward": {"mean": 0.9, "low": 0.8, "high": 1.0}}}, "its event says 0.900000"),
        ({"means": {}}, "records no mean reward"),
        ({"requested": 41}, "41 samples were requested"),
        ({"verifier": None, "file_sha": None}, "does not record verifier, file_sha"),
        ({"items_sha": "J"}, "items_sha differs"),
        ({"verifier": "v2"}, "verifier versions differ"),
        ({"prompt_sha": "Q"}, "prompt_sha differs"),
    ],
)
def test_an_event_that_does_not_fit_its_file_or_the_baseline_cannot_tell(world, changes, says):
    world.create().start().evaluate("base", make_items(8), step=0).evaluate(
        "policy", make_items(30), **changes
    ).finish()
    outcome = heldout(world)
    assert outcome.exit_code is ExitCode.CANNOT_TELL
    assert says in "; ".join(outcome.reasons)


def test_an_incomplete_eval_cannot_tell(world):
    world.create().start().evaluate("base", make_items(8), step=0).evaluate("policy", make_items(30)[:39]).finish()
    outcome = heldout(world)
    assert outcome.exit_code is ExitCode.CANNOT_TELL
    assert "39 of 40 requested samples" in "; ".join(outcome.reasons)


def test_without_a_baseline_eval_cannot_tell(world):
    world.create().start().evaluate("policy", make_items(30)).finish()
    assert heldout(world).exit_code is ExitCode.CANNOT_TELL


def test_without_an_eval_at_the_final_step_cannot_tell(world):
    world.create().start().evaluate("base", make_items(8), step=0).evaluate("policy", make_items(30), step=10).finish()
    outcome = heldout(world)
    assert outcome.exit_code is ExitCode.CANNOT_TELL
    assert "at the final step; evals are at steps 10" in "; ".join(outcome.reasons)


def test_another_step_can_be_judged_when_its_adapter_is_on_record(world):
    world.create().start().evaluate("base", make_items(8), step=0)
    world.evaluate("policy", make_items(30), step=10, adapter_sha="A10").evaluate("policy", make_items(12)).finish()
    assert heldout(world, dry_run=True).exit_code is ExitCode.NO
    outcome = heldout(world, step=10)
    assert outcome.step == 10 and outcome.promoted
    assert json.loads((world.program.root / outcome.certificate).read_text())["adapter_sha"] == "A10"
    assert heldout(world, step=15, dry_run=True).exit_code is ExitCode.CANNOT_TELL


def test_an_eval_that_no_adapter_hash_vouches_for_cannot_tell(world):
    world.create().start().evaluate("base", make_items(8), step=0)
    world.evaluate("policy", make_items(30), step=10).evaluate("policy", make_items(30)).finish()
    outcome = heldout(world, step=10)
    assert outcome.exit_code is ExitCode.CANNOT_TELL and "no adapter hash for step 10" in outcome.reasons[0]


def test_two_adapter_hashes_for_one_step_cannot_tell(world):
    world.create().start().evaluate("base", make_items(8), step=0)
    world.evaluate("policy", make_items(30), adapter_sha="other").finish()
    assert "several different adapter hashes" in heldout(world).reasons[0]


def test_evals_of_an_attempt_that_was_started_over_do_not_count(world):
    world.create().start().evaluate("base", make_items(8), step=0).evaluate("policy", make_items(30))
    world.finish(outcome="failed", failure="infra").start(attempt=2, resumed_from=15).finish(attempt=2)
    assert heldout(world).exit_code is ExitCode.CANNOT_TELL
    world.evaluate("policy", make_items(30), attempt=2)
    assert heldout(world).exit_code is ExitCode.OK


def test_an_eval_before_the_resume_point_still_counts(world):
    world.create().start().evaluate("base", make_items(8), step=0).evaluate("policy", make_items(30))
    world.finish(outcome="interrupted").start(attempt=2, resumed_from=20).finish(attempt=2)
    assert heldout(world).exit_code is ExitCode.OK


def shipped_goal(world):
    text = GOAL.replace("base_run_prompt", "base_shipped_prompt")
    world.program.goal.write_text(text)


def test_the_goal_names_the_baseline(world):
    shipped_goal(world)
    world.complete()
    assert heldout(world, dry_run=True).exit_code is ExitCode.CANNOT_TELL  # the run's own prompt is another one
    world.evaluate("base", make_items(29), step=0, prompt="shipped")
    assert heldout(world, dry_run=True).exit_code is ExitCode.NO
    world.evaluate("base", make_items(8), step=0, prompt="shipped")
    assert heldout(world).exit_code is ExitCode.OK


def test_the_run_prompt_serves_as_shipped_when_it_is_the_shipped_one(world):
    shipped_goal(world)
    world.create(prompt="shipped").start().evaluate("base", make_items(8), step=0)
    world.evaluate("policy", make_items(30)).finish()
    assert heldout(world).exit_code is ExitCode.OK


# Who may be promoted


def refused(world, says):
    before = world.tree()
    for dry_run in (True, False):
        with pytest.raises(PromotionRefusedError, match=says) as caught:
            heldout(world, dry_run=dry_run)
        assert caught.value.exit_code is ExitCode.NO and caught.value.hint
    assert world.tree() == before


def test_a_rejected_run_is_refused_until_a_new_decision_replaces_that(world):
    world.complete()
    decide(world.program, RUN, "reject", "it only learned the letter A")
    refused(world, r"was rejected \(it only learned the letter A\)")
    decide(world.program, RUN, "keep", "the letter count was wrong")
    assert heldout(world).exit_code is ExitCode.OK


def test_an_imported_run_is_refused(world):
    world.ledger.append(RUN, "imported", {"type": "import", "hypothesis": "h"})
    refused(world, "is imported")


def test_a_prompt_search_run_is_refused(world):
    world.create(type="prompt_search").start().finish()
    refused(world, "prompt-search run")


@pytest.mark.parametrize("outcome", ["failed", "interrupted", "stopped", None])
def test_without_a_completed_attempt_nothing_is_judged(world, outcome):
    world.create().start().evaluate("base", make_items(8), step=0).evaluate("policy", make_items(30))
    if outcome:
        world.finish(outcome=outcome)
    with pytest.raises(CannotTellError, match="the last attempt of run-001"):
        heldout(world)
    assert "gated" not in world.kinds()


def test_a_run_that_was_never_launched_cannot_be_judged(world):
    world.create()
    with pytest.raises(CannotTellError, match="never launched"):
        heldout(world)


def test_an_older_completed_attempt_does_not_count(world):
    world.complete().start(attempt=2)
    with pytest.raises(CannotTellError, match="has not finished"):
        heldout(world)


@pytest.mark.parametrize("name", ["GOAL.md", "CONTEXT.md"])
def test_an_edited_page_is_refused_and_an_amended_one_is_marked_post_hoc(world, name):
    world.complete()
    path, key = world.program.root / name, name.removesuffix(".md").lower()
    old = protocol_hashes(world.program)[key]
    path.write_text(path.read_text() + "\nOne more sentence.\n")
    refused(world, f"{name} was edited after run-001 started")
    new = protocol_hashes(world.program)[key]
    world.ledger.append("program", "amended", {"file": name, "old_sha": "x", "new_sha": new, "reason": "r"})
    refused(world, "no amendment records why")  # an amendment of something else
    world.ledger.append("program", "amended", {"file": name, "old_sha": old, "new_sha": new, "reason": "r"})
    outcome = heldout(world)
    assert outcome.exit_code is ExitCode.OK and outcome.post_hoc
    assert json.loads((world.program.root / outcome.certificate).read_text())["post_hoc"] is True


def test_an_edit_of_the_plan_does_not_matter(world):
    world.complete()
    world.program.plan.write_text("```toml\n```\nMore.\n")
    assert not heldout(world).post_hoc


def test_a_certificate_is_never_replaced(world):
    world.complete()
    heldout(world)
    world.evaluate("policy", make_items(31))
    refused(world, "promoted at step 20 on other evidence")


def test_an_eval_under_another_protocol_is_no_evidence(world):
    asked = read_context(world.program).eval.env[0].described()
    world.create().start().evaluate("base", make_items(8), step=0, protocol=asked)
    world.evaluate("policy", make_items(30), protocol=asked | {"temperature": 0.5}).finish()
    outcome = heldout(world)
    assert outcome.exit_code is ExitCode.CANNOT_TELL
    assert any("another temperature" in reason for gate in outcome.gates for reason in gate.reasons())
