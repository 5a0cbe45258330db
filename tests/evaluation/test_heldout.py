"""The frozen protocol: the same items and random numbers for every policy, and no item that was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from harness.backends.local import check_leaks  # noqa: E402
from harness.config.schema import EnvSection, RunConfig  # noqa: E402
from harness.core.errors import ConfigError, RefusedError  # noqa: E402
from harness.core.types import Completion, FailureClass, FinishReason  # noqa: E402
from harness.envs.registry import ENVIRONMENTS  # noqa: E402
from harness.evaluation.heldout import Recorder, engine_of, load_suites, run_suite  # noqa: E402
from harness.evaluation.records import read_items  # noqa: E402
from harness.inference.engine import TransformersEngine  # noqa: E402
from harness.inference.lora import save_adapter  # noqa: E402
from harness.inference.models import LoadedModel  # noqa: E402
from harness.ledger import Ledger  # noqa: E402
from harness.program import Program, init_program  # noqa: E402
from harness.program.documents import Context  # noqa: E402
from harness.rollouts.collect import Sampling  # noqa: E402
from harness.training.draws import TrainingEnv  # noqa: E402
from harness.training.tasks import TaskStream  # noqa: E402
from tests.rollouts.test_collect import END, Letters  # noqa: E402
from tests.torch_support import loaded as load_tiny  # noqa: E402
from tests.torch_support import tiny_llama, with_adapter  # noqa: E402
from tests.toy_env import SPEC, Toy, ToyArgs  # noqa: E402
from tests.training.second_model import SecondModel  # noqa: E402


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "toy", SPEC)


def context(**changes):
    env = {"id": "toy", "items": 5, "samples": 2, "max_tokens": 8, "temperature": 0.7}
    evaluation = {"seed": changes.pop("seed", 0), "interval": changes.pop("interval", 10)}
    return Context.model_validate({"model": {"name": "m"}, "eval": evaluation | {"env": [env | changes]}})


class FakeModel:
    class config:
        max_position_embeddings = 200


def loaded():
    return LoadedModel(FakeModel(), Letters(), frozenset({END}), torch.float32, torch.device("cpu"), Path())


class Policy:
    """Answers with letters that depend on its own offset and the seed; keeps what it was asked."""

    def __init__(self, offset=0):
        self.offset, self.calls = offset, []

    def generate(self, prompts, n, max_tokens, temperature, seeds):
        self.calls.append((prompts, n, max_tokens, temperature, seeds))
        return [[self.answer(seed) for seed in row] for row in seeds]

    def answer(self, seed):
        ids = tuple(97 + (seed // 7**place + self.offset) % 26 for place in range(4))
        return Completion((*ids, END), (-1.0,) * 5, FinishReason.STOP)


def run(policy, settings=None, components=None):
    settings = settings or context()
    (suite,) = load_suites(settings)
    return suite, run_suite(suite, policy, loaded(), settings, components, lambda update: None)


def test_two_policies_meet_the_same_items_and_seeds():
    first, second = Policy(0), Policy(5)
    _, items = run(first)
    _, others = run(second)
    assert first.calls == second.calls
    assert [item.key for item in items] == [item.key for item in others]
    assert [item.completion for item in items] != [item.completion for item in others]
    ((_, n, max_tokens, temperature, seeds),) = first.calls
    assert (n, max_tokens, temperature) == (2, 8, 0.7)
    flat = [seed for row in seeds for seed in row]
    assert len(set(flat)) == 10  # every sample has its own


def test_an_item_keeps_its_seed_whatever_stands_beside_it():
    few, many = Policy(), Policy()
    run(few, context(items=2))
    run(many, context(items=5))
    assert many.calls[0][4][:2] == few.calls[0][4]
    other = Policy()
    run(other, context(seed=1))
    assert other.calls[0][4] != many.calls[0][4]


def test_a_searched_prompt_changes_the_prompt_and_nothing_else():
    shipped, searched = Policy(), Policy()
    run(shipped)
    _, items = run(searched, components={"system": "Be brief."})
    assert shipped.calls[0][4] == searched.calls[0][4]
    assert shipped.calls[0][0] != searched.calls[0][0]
    assert items[0].prompt.startswith("[system]\nBe brief.")


def test_items_sha_moves_with_items_and_sampling_only():
    def sha(**changes):
        return load_suites(context(**changes))[0].items_sha

    base = sha()
    assert sha() == base
    assert sha(interval=3) == base
    different = [sha(items=4), sha(samples=3), sha(max_tokens=9), sha(temperature=0.8), sha(seed=1), sha(split="train")]
    assert len({base, *different}) == 7


def test_too_few_items_are_refused():
    with pytest.raises(ConfigError, match="asks for 7 items of toy/heldout, which has 6") as caught:
        load_suites(context(items=7))
    assert "harness amend CONTEXT.md" in caught.value.hint


def test_chunks_do_not_change_the_result(monkeypatch):
    _, whole = run(Policy())
    monkeypatch.setattr("harness.evaluation.heldout.CHUNK", 2)
    policy = Policy()
    _, parts = run(policy)
    assert len(policy.calls) == 3
    assert parts == whole


def test_a_verifier_failure_leaves_the_mean_and_is_counted():
    settings = context(args={"reward": "raises"})
    _, items = run(Policy(), settings)
    assert {item.failure for item in items} == {FailureClass.VERIFIER}


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_ACTOR", "agent:tester")
    init_program(tmp_path / "program", git=False)
    program = Program(tmp_path / "program")
    ledger = Ledger(program.ledger)
    ledger.append("run-001", "created", {"type": "training", "hypothesis": "h"})
    return Recorder(program, ledger, "run-001", 1, context())


def test_records_gains_over_both_bases(recorder):
    suite, base = run(Policy(0))
    _, shipped = run(Policy(3))
    _, policy = run(Policy(9))
    recorder.record(suite, base, "base", 0, "run", "p1", None)
    recorder.record(suite, shipped, "base", 0, "shipped", "p0", None)
    data = recorder.record(suite, policy, "policy", 10, "run", "p1", "ad")

    def mean(items):
        return sum(item.reward for item in items) / len(items)

    assert data["gain"]["reward"]["mean"] == pytest.approx(mean(policy) - mean(base))
    assert data["gain_shipped"]["reward"]["mean"] == pytest.approx(mean(policy) - mean(shipped))
    assert (data["n"], data["requested"], data["adapter_sha"]) == (10, 10, "ad")
    root = recorder.program.root
    assert data["file"] == "analysis/run-001/evals/step_10.policy.toy.jsonl"
    compact = list(read_items(root / data["file"]))
    assert [item.reward for item in compact] == [item.reward for item in sorted(policy, key=lambda item: item.key)]
    assert compact[0].completion is None
    full = list(read_items(root / "outputs/run-001/evals/step_10/policy.toy.jsonl"))
    assert full[0].completion
    assert (root / "outputs/run-001/evals/step_0/base.toy.shipped.jsonl").is_file()


def test_without_a_shipped_eval_the_base_is_both(recorder):
    suite, base = run(Policy(0))
    _, policy = run(Policy(9))
    recorder.record(suite, base, "base", 0, "run", "p0", None)
    data = recorder.record(suite, policy, "policy", 10, "run", "p0", "ad")
    assert data["gain"] == data["gain_shipped"]


def test_no_gain_over_a_base_that_answered_other_items_or_was_edited(recorder):
    suite, base = run(Policy(0))
    other, other_base = run(Policy(0), context(max_tokens=5))
    _, policy = run(Policy(9))
    recorder.record(other, other_base, "base", 0, "run", "p0", None)
    assert "gain" not in recorder.record(suite, policy, "policy", 10, "run", "p0", "ad")
    file = recorder.program.root / recorder.record(suite, base, "base", 0, "run", "p0", None)["file"]
    assert "gain" in recorder.record(suite, policy, "policy", 20, "run", "p0", "ad")
    file.write_bytes(file.read_bytes().replace(b'"reward":', b'"reward": '))
    assert "gain" not in recorder.record(suite, policy, "policy", 30, "run", "p0", "ad")


def test_an_eval_is_known_by_its_adapter_and_its_file(recorder):
    suite, items = run(Policy())
    assert not recorder.has(suite, "policy", 10, "run", "ad")
    data = recorder.record(suite, items, "policy", 10, "run", "p", "ad")
    assert recorder.has(suite, "policy", 10, "run", "ad")
    assert not recorder.has(suite, "policy", 10, "run", "another")
    assert not recorder.has(suite, "policy", 20, "run", "ad")
    other, _ = run(Policy(), context(max_tokens=5))
    assert other.items_sha != suite.items_sha
    assert not recorder.has(other, "policy", 10, "run", "ad")  # CONTEXT.md was amended in between
    assert not recorder.has(suite, "policy", 10, "shipped", "ad")
    path = recorder.program.root / data["file"]
    content = path.read_bytes()
    path.write_bytes(content + b"\n")
    assert not recorder.has(suite, "policy", 10, "run", "ad")
    path.unlink()
    assert not recorder.has(suite, "policy", 10, "run", "ad")


def training(env):
    stream = TaskStream(env.tasks("train"), True, 0)
    return {"toy": TrainingEnv(EnvSection(id="toy"), env, stream, None, Sampling(8, 1.0, 200))}


def test_disjoint_splits_pass():
    check_leaks(training(Toy(ToyArgs())), load_suites(context()))


@pytest.mark.parametrize("shared", ["id", "content", "cluster"])
def test_a_trained_item_is_refused(shared):
    env = Toy(ToyArgs())
    held, tasks = env.tasks("heldout")[2], list(env.tasks("train"))
    if shared == "id":
        tasks[5] = replace(tasks[5], id=held.id)
    elif shared == "content":
        tasks[5] = replace(held, cluster="elsewhere", split="train")
    else:
        tasks[5] = replace(tasks[5], cluster=held.cluster)
    env._tasks["train"] = tuple(tasks)
    with pytest.raises(RefusedError, match=held.id) as caught:
        check_leaks(training(env), load_suites(context()))
    assert "disjoint" in caught.value.hint


def test_items_beyond_the_protocol_may_be_trained_on():
    """Only what is evaluated is held out: the sixth task of the split is not among the five items."""
    env = Toy(ToyArgs())
    extra = env.tasks("heldout")[5]
    env._tasks["train"] = (*env.tasks("train"), extra)
    check_leaks(training(env), load_suites(context()))
    with pytest.raises(RefusedError):
        check_leaks(training(env), load_suites(context(items=6)))


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_run_is_evaluated_with_the_engine_it_samples_with(engine, tmp_path, monkeypatch):
    """Both sample from the adapter on disk; a second model stands in for vLLM."""
    started = []

    def start(config, base, log):
        started.append(SecondModel(log.parent))
        return started[-1]

    monkeypatch.setattr("harness.evaluation.heldout.start_engine", start)
    trained = with_adapter(tiny_llama(), seed=5)
    save_adapter(trained, tmp_path / "step_3")
    config = RunConfig.model_validate({"hypothesis": "h", "backend": {"engine": engine}})
    call = ([[1, 4, 5, 6]], 2, 6, 1.0, [[7, 8]])
    expected = TransformersEngine(load_tiny(trained.get_base_model()), trained).generate(*call)
    with engine_of(config, load_tiny(tiny_llama()), tmp_path / "step_3", tmp_path / "log") as found:
        answered = found.generate(*call)
    for one, other in zip(answered[0], expected[0], strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert [one.closed for one in started] == ([True] if engine == "vllm" else [])
    with engine_of(config, load_tiny(tiny_llama()), None, tmp_path / "log") as found:
        drawn = found.generate(*call)
    if engine == "transformers":
        assert drawn == TransformersEngine(load_tiny(tiny_llama())).generate(*call) != expected
    else:
        assert started[-1].calls[-1][1] == "base"
