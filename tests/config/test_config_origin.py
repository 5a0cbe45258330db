"""Where the value of a key comes from, and what goes over what."""

from harness.config.load import parse_config, set_key
from harness.config.origin import origins

ROOT = parse_config('hypothesis = "h"\n[lora]\nalpha = 16\n[[env]]\nid = "drugprot"\n', "a")


def told(*chain, frozen=None):
    return {
        found.key: found for found in origins([(f"run-00{len(chain) - i}", c) for i, c in enumerate(chain)], frozen)
    }


def test_a_default_is_no_runs_doing():
    found = told(ROOT)
    assert (found["lora.rank"].value, found["lora.rank"].origin) == (16, "default")
    assert (found["lora.alpha"].value, found["lora.alpha"].origin) == (16.0, "run-001")
    assert (found["env.drugprot.weight"].value, found["env.drugprot.weight"].origin) == (1.0, "default")
    assert "hypothesis" not in found


def test_the_oldest_run_of_an_unbroken_line_set_a_value():
    second = set_key(ROOT, "train.steps=50")
    third = set_key(second, "lora.alpha=64")
    found = told(third, second, ROOT)
    assert found["lora.alpha"].origin == "run-003"
    assert found["train.steps"].origin == "run-002"
    back = set_key(third, "lora.alpha=16")  # the same value again, but after another one
    assert told(back, third, second, ROOT)["lora.alpha"].origin == "run-004"


def test_going_back_to_a_default_is_a_decision_of_the_run():
    child = set_key(ROOT, "lora.alpha=")
    assert told(child, ROOT)["lora.alpha"].origin == "run-002"
    assert told(child, ROOT)["lora.rank"].origin == "default"
    grandchild = set_key(child, "train.steps=50")
    assert told(grandchild, child, ROOT)["lora.alpha"].origin == "default"


def test_frozen_keys_are_marked_by_pattern():
    found = told(ROOT, frozen={"model.*": None, "env.*.weight": 1.0})
    assert found["model.name"].frozen and found["env.drugprot.weight"].frozen and not found["lora.alpha"].frozen
