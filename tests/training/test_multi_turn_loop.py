"""A training run on episodes of several turns: what it stores and logs, and that a resume changes nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import EnvSection, RunConfig  # noqa: E402
from harness.core.types import Score  # noqa: E402
from harness.rollouts.collect import Sampling  # noqa: E402
from harness.rollouts.store import read_rollouts  # noqa: E402
from harness.training.draws import TrainingEnv  # noqa: E402
from harness.training.loop import Trainer  # noqa: E402
from harness.training.tasks import TaskStream  # noqa: E402
from tests.calculator_env import Calculator  # noqa: E402
from tests.chat_support import EOT, IM_END, QWEN_LIKE, chat_tokenizer  # noqa: E402
from tests.torch_support import loaded, tiny_llama  # noqa: E402
from tests.toy_env import early_share  # noqa: E402

TOKENIZER = chat_tokenizer(QWEN_LIKE)
ENDS = frozenset({IM_END, EOT, *range(40, 60)})


class Talkative(Calculator):
    """Rewards early letters in everything the model wrote, which a random model does more or less of."""

    def score(self, task, episode):
        text = "".join(m.content for m in episode.messages if m.role == "assistant")
        return Score(early_share(text), {"right": 0.0, "format": early_share(text)})


def trainer(folder, steps, **train):
    config = RunConfig.model_validate(
        {
            "hypothesis": "h",
            "lora": {"rank": 4},
            "train": {"steps": steps, "tasks_per_step": 2, "group_size": 3, **train},
            "sampling": {"max_tokens": 16, "max_turns": 3, "context": 400},
            "env": [{"id": "calculator"}],
            "checkpoint": {"interval": 1},
        }
    )
    env = Talkative()
    stream = TaskStream(env.tasks("train"), True, 0)
    envs = {"calculator": TrainingEnv(EnvSection(id="calculator"), env, stream, None, Sampling(16, 1.0, 400, 3))}
    return Trainer(
        config=config,
        config_sha="c",
        loaded=loaded(tiny_llama(vocabulary=len(TOKENIZER)), TOKENIZER, ENDS),
        envs=envs,
        folder=folder,
        attempt=1,
        eval_due=lambda step: False,
        on_eval=lambda *_: None,
        report=lambda update: None,
    )


def adapter(one):
    return {name: value.detach().clone() for name, value in one.parameters.items()}


def rows(folder):
    from harness.core.canonical import strict_loads

    return [strict_loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def test_a_run_over_several_turns_learns_logs_and_resumes_bit_for_bit(tmp_path):
    whole = trainer(tmp_path / "whole", 3)
    start = adapter(whole)
    whole.run()
    assert any(not torch.equal(start[name], value) for name, value in adapter(whole).items())
    first = rows(tmp_path / "whole")[0]
    assert 1 < first["train/turns/mean"] <= 3
    assert first["train/logprob_gap"] < 1e-5  # the trainer sees what the sampler saw, over all turns
    stored = list(read_rollouts(tmp_path / "whole/rollouts/step_1/calculator.jsonl"))
    assert len(stored) == 6 and any(row.get("turns") == 3 for row in stored)
    assert first["train/tokens/mean"] == pytest.approx(sum(row["tokens"] for row in stored) / 6)

    part = trainer(tmp_path / "part", 1)
    part.run()
    rest = trainer(tmp_path / "part", 3)
    assert rest.resume() == 1
    rest.run()
    assert all(torch.equal(adapter(rest)[name], value) for name, value in adapter(whole).items())
    for name in ("step_2", "step_3"):
        one, two = (tmp_path / place / "rollouts" / name / "calculator.jsonl" for place in ("whole", "part"))
        assert one.read_bytes() == two.read_bytes()


def test_memory_that_runs_out_is_logged_and_the_run_goes_on(tmp_path, monkeypatch):
    from harness.training.room import NoRoomError, Room

    def check(self, causal_lm, tree, *rest):
        if tree.tokens > 500:
            raise NoRoomError("not enough memory")

    plain = trainer(tmp_path / "plain", 2)
    plain.run()
    monkeypatch.setattr(Room, "check", check)
    limited = trainer(tmp_path / "limited", 2)
    limited.run()
    first, second = rows(tmp_path / "limited")
    assert first["perf/out_of_memory"] >= 1 and "perf/out_of_memory" not in second
    assert first["perf/microbatch_tokens"] == second["perf/microbatch_tokens"] < 500
    assert not any(key in row for row in rows(tmp_path / "plain") for key in ("perf/out_of_memory",))
    for mine, theirs in zip(rows(tmp_path / "limited"), rows(tmp_path / "plain"), strict=True):
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4, abs=1e-6)
        assert mine["optim/grad_norm"] == pytest.approx(theirs["optim/grad_norm"], rel=1e-4)
