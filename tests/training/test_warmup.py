"""The warm start: which tasks it shows, what its loss counts, that it learns, and that it is the same every time."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import RunConfig  # noqa: E402
from harness.core.canonical import strict_loads  # noqa: E402
from harness.core.errors import ConfigError, DivergedError, StoppedError  # noqa: E402
from harness.core.types import FailureClass, Score  # noqa: E402
from harness.inference.chat import render_chat, render_reply  # noqa: E402
from harness.inference.lora import trainable  # noqa: E402
from harness.rollouts.collect import Sampling  # noqa: E402
from harness.training.checkpoints import checkpoint_steps  # noqa: E402
from harness.training.draws import TrainingEnv  # noqa: E402
from harness.training.loop import Trainer  # noqa: E402
from harness.training.room import Room  # noqa: E402
from harness.training.tasks import TaskStream  # noqa: E402
from harness.training.warmup import (  # noqa: E402
    Batches,
    choose_demonstrations,
    example,
    imitate,
    read_summary,
    warm_up,
    without,
)
from tests.chat_support import EOT, IM_END, QWEN_LIKE, chat_tokenizer  # noqa: E402
from tests.torch_support import loaded, tiny_llama, with_adapter  # noqa: E402
from tests.toy_env import LABELS, Toy, ToyArgs  # noqa: E402
from tests.training.reference import relative_difference  # noqa: E402

TOKENIZER = chat_tokenizer(QWEN_LIKE)
ENDS = frozenset({IM_END, EOT})
SAMPLING = Sampling(16, 1.0, 300)
TOY = Toy(ToyArgs())


class Mute(Toy):
    """A toy environment that shows nothing."""

    id = "mute"
    demonstration = None  # type: ignore[assignment]


def chosen(count=6, seed=0, exclude=True):
    return choose_demonstrations({"toy": TOY}, {"toy": 1.0}, count, exclude, seed)["toy"]


def forget(parameters):
    for parameter in parameters:
        parameter.grad = None


def source(env=TOY, tasks=None, sampling=SAMPLING):
    unused: Any = None
    return TrainingEnv(unused, env, unused, None, sampling, chosen() if tasks is None else tasks)


def model(seed=0):
    return loaded(tiny_llama(vocabulary=len(TOKENIZER), layers=2, seed=seed), TOKENIZER, ENDS)


def batches(base, per_step=4, seed=0):
    return Batches(base, {"toy": source()}, {"toy": 1.0}, per_step, seed)


def config(**sections):
    values = {"hypothesis": "h", "lora": {"rank": 4}, "sampling": {"max_tokens": 16, "context": 300}}
    return RunConfig.model_validate(values | sections)


def test_the_tasks_are_distinct_and_their_labels_equally_often():
    tasks = chosen(9)
    assert len({task.id for task in tasks}) == 9
    assert Counter(task.label for task in tasks) == dict.fromkeys(LABELS, 3)
    assert {task.split for task in tasks} == {"train"}
    assert chosen(9) == tasks
    assert chosen(9, seed=1) != tasks
    left = without(TOY.tasks("train"), tasks)
    assert len(left) == 15 and not {task.id for task in left} & {task.id for task in tasks}


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ConfigError, match="asks for 25 tasks of toy, which has 24"):
        chosen(25)
    with pytest.raises(ConfigError, match="every training task of toy with the label"):
        chosen(24)
    assert len(chosen(24, exclude=False)) == 24
    with pytest.raises(ConfigError, match="none of the environments mute has demonstrations"):
        choose_demonstrations({"mute": Mute(ToyArgs())}, {"mute": 1.0}, 3, True, 0)


def test_environments_share_the_demonstrations_by_weight_and_the_mute_ones_have_none():
    other = Toy(ToyArgs())
    envs = {"toy": TOY, "mute": Mute(ToyArgs()), "other": other}
    found = choose_demonstrations(envs, {"toy": 2.0, "mute": 5.0, "other": 1.0}, 9, True, 0)
    assert {name: len(tasks) for name, tasks in found.items()} == {"toy": 6, "other": 3}


def test_every_step_shows_the_labels_equally_often_and_depends_on_seed_and_step_alone():
    base = model()
    first = batches(base, per_step=3)
    for step in (1, 2, 7):
        tasks = [group.rollouts[0].task for group in first[step]]
        assert sorted(task.label for task in tasks) == list(LABELS)
        assert tasks == [group.rollouts[0].task for group in batches(base, per_step=3)[step]]
    seen = {group.rollouts[0].task.id for step in range(1, 3) for group in first[step]}
    assert seen == {task.id for task in chosen()}


def test_a_reply_ends_as_the_model_would_end_it_and_the_prompt_is_that_of_a_rollout():
    base, task = model(), chosen()[0]
    group = example(base, source(), task)
    messages = TOY.start(task).messages
    (rollout,) = group.rollouts
    assert list(rollout.prompt_ids) == render_chat(TOKENIZER, messages)
    reply = TOY.demonstration(task)
    assert list(rollout.token_ids) == [*TOKENIZER(reply, add_special_tokens=False)["input_ids"], IM_END]
    assert all(rollout.sampled)
    assert render_reply(TOKENIZER, messages, reply, ENDS) == list(rollout.token_ids)
    with pytest.raises(ConfigError, match="does not close a reply"):
        render_reply(TOKENIZER, messages, reply, frozenset({EOT}))


def test_demonstrations_that_do_not_fit_or_are_wrong_are_refused():
    base, task = model(), chosen()[0]
    with pytest.raises(ConfigError, match=r"beyond sampling.max_tokens = 2 "):
        example(base, source(sampling=Sampling(2, 1.0, 300)), task)
    with pytest.raises(ConfigError, match=r"context = 20"):
        example(base, source(sampling=Sampling(16, 1.0, 20)), task)

    class Wrong(Toy):
        def score(self, task, episode):
            return Score(0.0, {"early": 0.0}, failure=FailureClass.MODEL)

    with pytest.raises(ConfigError, match="is not scored as right"):
        example(base, source(Wrong(ToyArgs())), task)


def test_the_gradient_is_that_of_plain_transformers_with_the_prompt_masked():
    """Labels of -100 are what every supervised trainer gives prompt tokens; the mean is over all other tokens."""
    base = model()
    wrapped = with_adapter(base.model)
    parameters, causal_lm = trainable(wrapped), wrapped.get_base_model()
    groups = batches(base)[1]
    causal_lm.set_attn_implementation("eager")
    total = sum(len(group.rollouts[0].token_ids) for group in groups)
    expected = 0.0
    for group in groups:
        prompt, reply = list(group.prompt), list(group.rollouts[0].token_ids)
        labels = torch.tensor([[-100] * len(prompt) + reply])
        part = causal_lm(input_ids=torch.tensor([prompt + reply]), labels=labels).loss * len(reply) / total
        part.backward()
        expected += float(part.detach())
    naive = {name: parameter.grad.clone() for name, parameter in parameters.items()}

    for budget in (6144, 60):  # one pass, and several
        found = {}
        keep = SimpleNamespace(
            step=lambda: found.update({name: p.grad.clone() for name, p in parameters.items()}),  # noqa: B023
            zero_grad=lambda set_to_none: forget(parameters.values()),
        )
        done = imitate(causal_lm, list(parameters.values()), cast(Any, keep), groups, config().train, 1e9, Room(budget))
        assert done.loss == pytest.approx(expected, rel=1e-5)
        assert done.tokens == total
        assert relative_difference(found, naive) < 1e-5


def run_warm_up(optimizer="adamw", rate=0.01, check=lambda: None, seed=0):
    base = model()
    wrapped = with_adapter(base.model)
    rows = []
    settings = config(
        warmup={"steps": 12, "items_per_step": 3, "learning_rate": rate},
        optimizer={"name": optimizer, "learning_rate": 0.5},
        train={"seed": seed},
    )
    done = warm_up(
        wrapped.get_base_model(),
        trainable(wrapped),
        batches(base, 3, seed),
        settings,
        Room(6144),
        lambda step, row: rows.append({"step": step} | row),
        check,
    )
    return done, rows, {name: value.detach().clone() for name, value in trainable(wrapped).items()}


def test_it_lowers_its_loss_and_is_the_same_again_whatever_the_optimizer_of_the_run():
    done, rows, weights = run_warm_up()
    assert done[-1].loss < 0.9 * done[0].loss
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[0]["warmup/learning_rate"] == 0.01 and rows[-1]["warmup/learning_rate"] == pytest.approx(0.01 / 12)
    assert all(row["warmup/loss"] == step.loss for row, step in zip(rows, done, strict=True))
    again, _, same = run_warm_up(optimizer="muon")
    assert again == done
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    other, _, _ = run_warm_up(seed=1)
    assert other != done


def test_a_gradient_that_is_not_finite_ends_it():
    base = model()
    wrapped = with_adapter(base.model)
    with torch.no_grad():
        next(iter(trainable(wrapped).values())).fill_(float("nan"))
    with pytest.raises(DivergedError, match="gradient of the warm start"):
        warm_up(
            wrapped.get_base_model(), trainable(wrapped), batches(base), config(warmup={"steps": 1}), Room(6144),
            lambda step, row: None, lambda: None,
        )  # fmt: skip


def trainer(folder, evals, steps=1, budget=None, warmup=2):
    settings = config(
        train={"steps": steps, "tasks_per_step": 2, "group_size": 2, "preflight_groups": 0},
        warmup={"steps": warmup, "items_per_step": 3, "learning_rate": 0.01},
        budget={} if budget is None else {"tokens": budget},
    )
    env = source()
    env.section = SimpleNamespace(weight=1.0)
    env.stream = TaskStream(without(TOY.tasks("train"), env.demonstrated), True, 0)
    return Trainer(
        config=settings,
        config_sha="c",
        loaded=model(),
        envs={"toy": env},
        folder=folder,
        attempt=1,
        eval_due=lambda step: step == steps,
        on_eval=lambda engine, step, sha: evals.append((step, sha)),
        report=lambda update: None,
    )


def rows_of(folder, name):
    return [strict_loads(line) for line in (folder / name).read_bytes().splitlines()]


def test_the_loop_evaluates_the_base_then_the_warm_policy_and_resumes_behind_it(tmp_path):
    evals = []
    whole = trainer(tmp_path / "whole", evals)
    whole.run()
    (base, warm, final) = evals
    assert base == (0, None) and warm[0] == 0 and final[0] == 1
    assert len({warm[1], final[1], None}) == 3
    assert [row["step"] for row in rows_of(tmp_path / "whole", "warmup.jsonl")] == [1, 2]
    assert [row["step"] for row in rows_of(tmp_path / "whole", "metrics.jsonl")] == [1]
    tokens = sum(int(row["warmup/tokens"]) for row in rows_of(tmp_path / "whole", "warmup.jsonl"))
    assert whole.demonstrated_tokens == tokens > 0
    summary = read_summary(tmp_path / "whole")
    assert summary is not None
    assert (summary["steps"], summary["demonstrations"], summary["tokens"]) == (2, 6, tokens)

    cut = tmp_path / "cut"
    early = trainer(cut, [])
    early.on_eval = lambda engine, step, sha: (_ for _ in ()).throw(KeyboardInterrupt) if sha else None
    with pytest.raises(KeyboardInterrupt):  # behind the warm start, before its eval
        early.run()
    assert checkpoint_steps(cut / "checkpoints") == [0]
    later = []
    resumed = trainer(cut, later)
    assert resumed.resume() == 0
    assert resumed.progress.tokens == tokens
    resumed.run()
    assert later == [warm, final]
    assert len(rows_of(cut, "warmup.jsonl")) == 2
    assert all(torch.equal(whole.parameters[name], value) for name, value in resumed.parameters.items())
    assert resumed.progress == whole.progress
    assert not resumed.demonstrated_tokens


def test_the_token_budget_counts_demonstrations_and_can_end_the_warm_start(tmp_path):
    short = trainer(tmp_path, [], budget=1)
    with pytest.raises(StoppedError, match="budget of 1 "):
        short.run()
    assert [row["step"] for row in rows_of(tmp_path, "warmup.jsonl")] == [1]
    assert checkpoint_steps(tmp_path / "checkpoints") == []


def test_a_run_without_warm_start_writes_nothing_of_one(tmp_path):
    evals = []
    trainer(tmp_path, evals, warmup=0).run()
    assert [step for step, _ in evals] == [0, 1]
    assert not list(tmp_path.glob("warmup*"))
    assert read_summary(tmp_path) is None
    assert 0 not in checkpoint_steps(tmp_path / "checkpoints")
