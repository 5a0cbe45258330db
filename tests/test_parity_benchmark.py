"""The bfloat16 comparison: the sampler led along texts, the verdict, and a store that goes on where it ended."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import parity_bf16  # noqa: E402

from tests.torch_support import loaded, tiny_llama  # noqa: E402

SIZE = parity_bf16.GIVEN + parity_bf16.LENGTH


def rows(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 128, (count, SIZE), generator=generator).tolist()


def test_the_sampler_follows_texts_and_agrees_with_the_trainer_in_float32(tmp_path):
    model, texts, store = loaded(tiny_llama()), rows(3), tmp_path / "store"
    parity_bf16.measure(model, texts[:2], 1, store)
    assert [line["first"] for line in parity_bf16.stored(store)] == [0, 1]
    first = json.loads(store.read_text().splitlines()[0])
    assert len(first["trainer"]) == parity_bf16.LENGTH
    assert torch.tensor(first["trainer"]).sub(torch.tensor(first["sampler"])).abs().max() < 1e-4


def test_a_second_call_measures_only_what_is_missing(tmp_path):
    store, texts = tmp_path / "store", rows(2)
    store.write_text(json.dumps({"first": 0, "trainer": [], "sampler": []}) + "\n")
    parity_bf16.measure(loaded(tiny_llama()), texts, 1, store)
    assert [line["first"] for line in parity_bf16.stored(store)] == [0, 1]
    assert parity_bf16.stored(store)[0]["trainer"] == []


@pytest.mark.parametrize(
    ("shift", "noise", "passed"),
    [(0.0, 0.05, True), (0.004, 0.05, False), (0.0, 0.2, False)],
    ids=["noise", "a shift below 0.005 of many errors", "too much noise"],
)
def test_the_verdict(shift, noise, passed):
    generator = torch.Generator().manual_seed(1)
    sampler = torch.full((160 * parity_bf16.LENGTH,), -2.0, dtype=torch.float64)
    gap = noise * torch.randn(len(sampler), generator=generator, dtype=torch.float64)
    found = parity_bf16.judge(sampler + shift + gap - gap.mean(), sampler)
    assert found.passed is passed
    assert found.signed == pytest.approx(shift, abs=1e-9) and found.tokens == len(sampler)
