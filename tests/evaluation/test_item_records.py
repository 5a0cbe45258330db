"""Item files: deterministic bytes, strict reading, errors that name file and line."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.canonical import sha256_hex
from harness.core.errors import CannotTellError, NotFoundError, UsageError
from harness.core.types import FailureClass, FinishReason
from harness.evaluation.records import ItemRecord, dump_items, parse_items, read_items, write_items

NUMBERS = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), st.floats(allow_nan=False), max_size=3)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
ITEMS = st.lists(
    st.builds(
        ItemRecord,
        task=TEXT,
        cluster=TEXT,
        sample=st.integers(0, 9),
        reward=st.floats(allow_nan=False),
        components=NUMBERS,
        metrics=NUMBERS,
        failure=st.sampled_from([None, *FailureClass]),
        prompt=st.none() | TEXT,
        completion=st.none() | TEXT,
        finish=st.sampled_from([None, *FinishReason]),
        diagnostics=st.dictionaries(TEXT, TEXT, max_size=2),
    ),
    max_size=5,
    unique_by=lambda item: item.key,
)


def item(task="t1", sample=0, **changes):
    values: dict[str, Any] = {
        "cluster": "c1",
        "reward": 0.5,
        "components": {"accuracy": 1.0},
        "metrics": {},
        "failure": None,
    }
    return ItemRecord(task=task, sample=sample, **(values | changes))


@settings(deadline=None, max_examples=60)
@given(ITEMS)
def test_the_full_form_round_trips_and_its_bytes_are_stable(items):
    data = dump_items(items, compact=False)
    again = parse_items(data, "x")
    assert sorted(items, key=lambda i: i.key) == again
    assert dump_items(reversed(again), compact=False) == data


@settings(deadline=None, max_examples=60)
@given(ITEMS)
def test_the_compact_form_drops_only_the_texts(items):
    again = parse_items(dump_items(items), "x")
    assert [(i.key, i.reward, i.components, i.metrics, i.failure) for i in again] == [
        (i.key, i.reward, i.components, i.metrics, i.failure) for i in sorted(items, key=lambda i: i.key)
    ]
    assert all(i.prompt is None and i.completion is None and not i.diagnostics for i in again)


def test_the_line_of_an_item_is_what_the_docs_say(tmp_path):
    path = tmp_path / "evals" / "step_0.base.drugprot.jsonl"
    sha = write_items(
        path,
        [
            item("b", metrics={"z": 2, "a": math.nan}, failure=FailureClass.MODEL),
            item("a", sample=1, reward=0.1 + 0.2),
            item("a"),
        ],
    )
    assert path.read_text().splitlines() == [
        '{"task":"a","cluster":"c1","sample":0,"reward":0.5,"components":{"accuracy":1.0},"metrics":{},"failure":null}',
        '{"task":"a","cluster":"c1","sample":1,"reward":0.30000000000000004,"components":{"accuracy":1.0},'
        '"metrics":{},"failure":null}',
        '{"task":"b","cluster":"c1","sample":0,"reward":0.5,"components":{"accuracy":1.0},'
        '"metrics":{"a":{"$non_finite":"nan"},"z":2.0},"failure":"model"}',
    ]
    assert sha == sha256_hex(path.read_bytes())
    assert math.isnan(read_items(path)[2].metrics["a"])


def test_samples_sort_as_numbers():
    numbers = [i.sample for i in parse_items(dump_items([item(sample=n) for n in (10, 9, 0)]), "x")]
    assert numbers == [0, 9, 10]


def test_text_separators_and_lone_surrogates_do_not_break_the_file():
    data = dump_items([item(completion="a\u2028b\x85c\nd\ud800", diagnostics={"error": "\udfff"})], compact=False)
    (again,) = parse_items(data, "x")
    assert again.completion == "a\u2028b\x85c\nd?"
    assert data.count(b"\n") == 1


GOOD = json.loads(dump_items([item()]))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("[]", "not a JSON object"),
        (json.dumps(GOOD | {"rewrad": 1}), "unknown member 'rewrad'"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "cluster"}), "'cluster' is missing"),
        (json.dumps(GOOD | {"reward": math.nan}), "NaN is not JSON"),
        (json.dumps(GOOD | {"reward": "0.5"}), "not a number"),
        (json.dumps(GOOD | {"reward": True}), "not a number"),
        (json.dumps(GOOD | {"sample": -1}), "sample must be"),
        (json.dumps(GOOD | {"sample": 1.0}), "sample must be"),
        (json.dumps(GOOD | {"task": ""}), "task must be"),
        (json.dumps(GOOD | {"components": [1]}), "components must be"),
        (json.dumps(GOOD | {"failure": "network"}), "network"),
        (json.dumps(GOOD | {"finish": "stopped"}), "stopped"),
        (json.dumps(GOOD | {"diagnostics": {"a": 1}}), "diagnostics must be"),
        (json.dumps(GOOD | {"prompt": 3}), "prompt must be"),
        (json.dumps(GOOD)[:-1] + ',"reward":1}', "duplicate key 'reward'"),
        ("[" * 5000, "nested deeper"),
        (json.dumps(GOOD), "sample 0 twice"),
    ],
)
def test_damage_names_file_and_line(line, says):
    data = f"{json.dumps(GOOD)}\n{line}\n".encode()
    with pytest.raises(CannotTellError, match=f"evals/a.jsonl, line 2: .*{says}") as caught:
        parse_items(data, "evals/a.jsonl")
    assert "git" in caught.value.hint


def test_a_torn_last_line_is_damage():
    data = dump_items([item("a"), item("b")])
    for cut in range(data.index(b"\n") + 2, len(data)):
        with pytest.raises(CannotTellError, match="torn"):
            parse_items(data[:cut], "x")


def test_invalid_utf8_is_damage():
    with pytest.raises(CannotTellError, match="line 1"):
        parse_items(b'{"task":"\xff"}\n', "x")


def test_an_absent_file_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match=r"nothing\.jsonl"):
        read_items(tmp_path / "nothing.jsonl")


def test_a_repeated_item_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match="twice"):
        write_items(tmp_path / "a.jsonl", [item(), item()])
    assert not list(tmp_path.iterdir())


def test_an_empty_eval_is_an_empty_file(tmp_path):
    write_items(tmp_path / "a.jsonl", [])
    assert read_items(tmp_path / "a.jsonl") == []


def test_value_finds_reward_components_and_metrics():
    record = item(metrics={"length": 3.0})
    assert (record.value("reward"), record.value("accuracy"), record.value("length")) == (0.5, 1.0, 3.0)
    assert record.value("other") is None
