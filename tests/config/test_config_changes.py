"""What counts as a change and what only follows from one."""

import json

import pytest

from harness.config.changes import Basis, Change, change_set, diff, flatten, is_nuisance, same
from harness.config.load import parse_config, resolved, set_key

CONFIG = parse_config('hypothesis = "h"\n[[env]]\nid = "drugprot"\nargs = { source = "embedded" }\n', "test")
FACTS = {"version": "1", "verifier": "v1", "tasks_sha": "t1"}
EVAL = {"eval_protocol": "p1", "eval_verifier": "v1", "eval_tasks_sha": "h1"}
CODE = {"commit": "c1", "harness_sha": "s1", "training_version": "1"}


def basis(*sets, facts=None, prompts=None, code=None):
    config = CONFIG
    for item in sets:
        config = set_key(config, item)
    return Basis(
        resolved(config),
        {"drugprot": {**FACTS, **EVAL, **(facts or {})}},
        prompts or {"drugprot": "prompt1"},
        {**CODE, **(code or {})},
    )


def counting(child, nuisance=()):
    return [change.key for change in change_set(basis(), child, nuisance).counting]


def shown(child):
    return [change.key for change in change_set(basis(), child)]


def test_nothing_changes_between_equals():
    assert len(change_set(basis(), basis())) == 0


def test_one_key_is_one_change():
    changes = change_set(basis(), basis("lora.alpha=64"))
    assert changes.changes == (Change("lora.alpha", 32.0, 64.0, "config", True),)
    assert str(changes.changes[0]) == "lora.alpha: 32.0 → 64.0"


def test_nuisance_keys_are_shown_but_do_not_count():
    child = basis("train.seed=3", "checkpoint.keep=9", "backend.threads=1", "budget.tokens=5", "lora.alpha=64")
    assert counting(child) == ["lora.alpha"]
    assert set(shown(child)) == {"train.seed", "checkpoint.keep", "backend.threads", "budget.tokens", "lora.alpha"}
    assert counting(child, nuisance=["lora.*"]) == []


def test_why_a_run_exists_is_no_change():
    other = CONFIG.model_copy(update={"hypothesis": "x", "parent": "run-001", "lever": "l", "replicate_of": "run-001"})
    assert diff(CONFIG, other) == []


@pytest.mark.parametrize(
    ("facts", "counts"),
    [
        ({"version": "2"}, ["env.drugprot.version"]),
        (
            {"version": "2", "verifier": "v2", "tasks_sha": "t2", "eval_verifier": "v2", "eval_tasks_sha": "h2"},
            ["env.drugprot.version"],
        ),
        ({"verifier": "v2", "eval_verifier": "v2"}, ["env.drugprot.verifier"]),
        ({"tasks_sha": "t2", "eval_tasks_sha": "h2"}, ["env.drugprot.tasks_sha"]),
        ({"eval_tasks_sha": "h2"}, ["env.drugprot.eval_tasks_sha"]),
        ({"eval_protocol": "p2", "eval_tasks_sha": "h2", "eval_verifier": "v2"}, []),
        ({"verifier": "v2", "tasks_sha": "t2"}, ["env.drugprot.verifier", "env.drugprot.tasks_sha"]),
    ],
)
def test_code_counts_only_where_it_moves_a_version(facts, counts):
    child = basis(facts=facts, code={"commit": "c2", "harness_sha": "s2"})
    assert counting(child) == counts
    assert {f"env.drugprot.{fact}" for fact in facts} | {"code.commit", "code.harness_sha"} == set(shown(child))


def test_training_maths_count():
    assert counting(basis(code={"training_version": "2"})) == ["code.training_version"]


def test_prompt_texts_count_once():
    assert counting(basis(prompts={"drugprot": "prompt2"})) == ["env.drugprot.prompt_sha"]
    assert counting(basis("env.drugprot.prompt=p7", prompts={"drugprot": "p7"})) == ["env.drugprot.prompt"]
    assert counting(basis(facts={"version": "2"}, prompts={"drugprot": "prompt2"})) == ["env.drugprot.version"]


def test_what_follows_from_arguments_does_not_count_again():
    child = basis("env.drugprot.args.source=official", facts={"tasks_sha": "t2", "verifier": "v2"})
    assert counting(child) == ["env.drugprot.args.source"]


def test_an_added_or_removed_environment_is_one_change():
    added = set_key(CONFIG, "env.drug_tool.id=drug_tool")
    child = Basis(
        resolved(added),
        {**basis().environments, "drug_tool": FACTS},
        {"drugprot": "prompt1", "drug_tool": "prompt9"},
        CODE,
    )
    assert [c.key for c in change_set(basis(), child).counting] == ["env.drug_tool"]
    assert [c.key for c in change_set(child, basis()).counting] == ["env.drug_tool"]
    assert diff(CONFIG, added)[0].new["id"] == "drug_tool"


def test_order_of_environments_is_no_change():
    two = set_key(CONFIG, "env.other.id=other")
    assert diff(two, two.model_copy(update={"env": two.env[::-1]})) == []


def test_keys_added_to_the_schema_since_are_no_change():
    old = resolved(CONFIG)
    del old["lora"]["dropout"], old["budget"]
    assert diff(old, CONFIG) == []


def test_a_removed_key_is_shown_raw():
    old = resolved(CONFIG)
    old["train"]["gone"] = 1
    assert diff(old, CONFIG) == [("train.gone", 1, None)]


def test_values_compare_as_people_read_them():
    def with_arg(value):
        return resolved(set_key(CONFIG, f"env.drugprot.args.x={value}"))

    assert diff(with_arg("1"), with_arg("1.0")) == []
    assert diff(with_arg("1"), with_arg("true")) == [("env.drugprot.args.x", 1, True)]
    assert diff(with_arg("[1, 2]"), with_arg("[1, 2.0]")) == []
    assert diff(with_arg("[1, 2]"), with_arg("[2, 1]")) == [("env.drugprot.args.x", [1, 2], [2, 1])]


def test_tables_and_lists_compare_member_by_member():
    assert same({"a": 1, "b": [1, {"c": 2}]}, {"b": [1.0, {"c": 2.0}], "a": 1})
    assert not same({"a": 1}, {"a": True})
    assert not same({"a": 1}, {"a": 2})
    assert not same({"a": 1}, {"b": 1}) and not same({"a": 1}, {"a": 1, "b": 1})
    assert not same({"a": 1}, [1]) and not same([1], {"a": 1})
    assert not same([1, 2], [1]) and not same([1], [1, 2]) and not same([1], 1)
    assert same(True, True) and not same(True, 1) and not same(0, False) and not same(None, False)


def test_a_change_is_spelt_short():
    assert str(Change("k", None, "x" * 61, "config", True)) == "k: none → " + "x" * 57 + "…"
    assert str(Change("k", "x" * 60, [1, float("nan")], "config", True)).startswith("k: " + "x" * 60 + " → [1,{")


def test_bases_and_changes_survive_json():
    child = basis("lora.alpha=64")
    assert change_set(child, Basis.from_json(json.loads(json.dumps(child.to_json())))).changes == ()
    change = change_set(basis(), child).changes[0]
    assert Change.from_json(json.loads(json.dumps(change.to_json()))) == change


def test_facts_an_older_writer_did_not_know_do_not_count():
    assert change_set(Basis(resolved(CONFIG)), basis()).counting == ()


def test_flatten_and_nuisance():
    assert flatten(resolved(CONFIG))["env.drugprot.args.source"] == "embedded"
    assert is_nuisance("checkpoint.interval") and not is_nuisance("train.steps")


def test_an_argument_that_only_spells_out_its_default_is_no_change():
    spelt = {"args": {"source": "embedded", "variant": "hardened"}}
    assert change_set(basis(facts=spelt), basis("env.drugprot.args.variant=hardened", facts=spelt)).changes == ()
    other = {"args": {"source": "embedded", "variant": "published"}}
    child = basis("env.drugprot.args.variant=published", facts=other)
    assert [str(c) for c in change_set(basis(facts=spelt), child)] == [
        "env.drugprot.args.variant: hardened → published"
    ]
