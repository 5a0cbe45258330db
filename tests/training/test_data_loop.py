"""Which tasks a run learns from: resampling, curriculum, weights, the preflight; and that a resume changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from harness.config.schema import EnvSection, RunConfig  # noqa: E402
from harness.core.canonical import strict_loads  # noqa: E402
from harness.core.errors import DivergedError, RefusedError  # noqa: E402
from harness.core.types import FailureClass, Message, Score, Task  # noqa: E402
from harness.envs.base import SingleTurnSession  # noqa: E402
from harness.rollouts.collect import Sampling  # noqa: E402
from harness.rollouts.store import read_rollouts  # noqa: E402
from harness.training.draws import TrainingEnv  # noqa: E402
from harness.training.loop import Trainer  # noqa: E402
from harness.training.tasks import TaskStream  # noqa: E402
from tests.chat_support import EOT, IM_END, QWEN_LIKE, chat_tokenizer  # noqa: E402
from tests.torch_support import loaded, tiny_llama  # noqa: E402
from tests.toy_env import early_share  # noqa: E402

TOKENIZER = chat_tokenizer(QWEN_LIKE)
ENDS = frozenset({IM_END, EOT, *range(40, 60)})
UNTIMED = ("time", "perf/", "attempt")


class Tasks:
    """Tasks of three labels; `dead` share of them gives every reply the same reward. About half of all replies pass."""

    version = verifier_version = "1"
    redistributable = True

    def __init__(self, name="letters", dead=0.0, count=12):
        self.id, self.dead = name, dead
        self._train = tuple(
            Task(f"{name}-{n:02d}", name, "train", {"w": f"w{n}"}, "A", "ABC"[n % 3], f"c{n}") for n in range(count)
        )

    def components(self):
        return {}

    def component_names(self):
        return ("early",)

    def tasks(self, split):
        return self._train

    def start(self, task, components=None):
        return SingleTurnSession((Message("user", task.fields["w"]),))

    def score(self, task, episode):
        share = early_share(episode.final)
        flat = int(task.id[-2:]) < self.dead * len(self._train)
        right = sum(map(ord, episode.final)) % 2 == 0
        return Score(0.5 if flat else share, {"early": share}, failure=None if right else FailureClass.MODEL)


def trainer(folder, steps, envs=(("letters", 1.0, 0.0),), seed=0, anyway=False, said=None, tasks=12, **train):
    config = RunConfig.model_validate(
        {
            "hypothesis": "h",
            "lora": {"rank": 4},
            "train": {"steps": steps, "tasks_per_step": 2, "group_size": 3, "seed": seed, **train},
            "sampling": {"max_tokens": 12, "context": 200},
            "env": [{"id": name, "weight": weight} for name, weight, _ in envs],
            "checkpoint": {"interval": 1},
        }
    )
    loaded_envs = {}
    for section, (name, _, dead) in zip(config.env, envs, strict=True):
        env = Tasks(name, dead, tasks)
        stream = TaskStream(env.tasks("train"), config.train.balance_labels, seed)
        loaded_envs[name] = TrainingEnv(section, env, stream, None, Sampling(12, 1.0, 200))
    return Trainer(
        config=config,
        config_sha="c",
        loaded=loaded(tiny_llama(vocabulary=len(TOKENIZER), layers=1), TOKENIZER, ENDS),
        envs=loaded_envs,
        folder=folder,
        attempt=1,
        eval_due=lambda step: False,
        on_eval=lambda *_: None,
        report=(said if said is not None else []).append,
        anyway=anyway,
    )


def adapter(one):
    return {name: value.detach().clone() for name, value in one.parameters.items()}


def rows(folder):
    return [strict_loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def plain(row):
    return {k: v for k, v in row.items() if not k.startswith(UNTIMED)}


def rollouts(folder, env="letters"):
    """Return the tasks of every stored rollout by step."""
    found = {}
    for path in folder.glob(f"rollouts/step_*/{env}.jsonl"):
        found[int(path.parent.name[5:])] = [row["task"] for row in read_rollouts(path)]
    return dict(sorted(found.items()))


def assert_resumes_alike(folder, steps, cut, **settings):
    """Run whole, and in two parts: adapters, rollouts and metrics are the same."""
    whole = trainer(folder / "whole", steps, **settings)
    whole.run()
    trainer(folder / "part", cut, **settings).run()
    rest = trainer(folder / "part", steps, **settings)
    assert rest.resume() == cut
    rest.run()
    assert rest.progress == whole.progress
    assert all(torch.equal(adapter(rest)[name], value) for name, value in adapter(whole).items())
    assert [plain(row) for row in rows(folder / "part")] == [plain(row) for row in rows(folder / "whole")]
    for path in (folder / "whole").glob("rollouts/*/*"):
        assert (folder / "part" / path.relative_to(folder / "whole")).read_bytes() == path.read_bytes()
    return whole


def test_groups_without_spread_are_replaced_up_to_the_cap_and_a_resume_draws_the_same(tmp_path):
    dead = (("letters", 1.0, 0.6),)
    assert_resumes_alike(tmp_path, 4, 2, envs=dead, resample_groups=3)
    found = rows(tmp_path / "whole")
    extra = [row["train/groups_resampled"] for row in found]
    assert max(extra) > 0 and all(0 <= count <= 3 for count in extra)
    for row, (step, tasks) in zip(found, rollouts(tmp_path / "whole").items(), strict=True):
        groups = len(tasks) // 3
        assert groups == 2 + row["train/groups_resampled"] and row["step"] == step
        assert row["train/groups_used"] == 2 or row["train/groups_resampled"] == 3
    # without the cap the run learns from fewer groups, and its row says nothing of resampling
    trainer(tmp_path / "none", 4, envs=dead).run()
    less = rows(tmp_path / "none")
    assert sum(row["train/groups_used"] for row in less) < sum(row["train/groups_used"] for row in found)
    assert "train/groups_resampled" not in less[0]


def test_a_curriculum_prefers_tasks_inside_the_band_and_is_part_of_the_checkpoint(tmp_path):
    band = {"curriculum_low": 0.5, "curriculum_high": 1.0}
    whole = assert_resumes_alike(tmp_path, 8, 5, curriculum="pass_rate", balance_labels=False, tasks=6, **band)
    rates = whole.progress.pass_rates
    assert len(rates) == 6 and all(key.startswith("letters/") and 0 <= rate <= 1 for key, rate in rates.items())
    trainer(tmp_path / "off", 8, balance_labels=False, tasks=6).run()
    assert rollouts(tmp_path / "off") != rollouts(tmp_path / "whole")
    before = {}
    chosen = Counter()
    for step, tasks in rollouts(tmp_path / "whole").items():
        for task in dict.fromkeys(tasks):
            rate = before.get(task)
            chosen["preferred" if rate is None or rate >= 0.5 else "other"] += step > 3
        for task in dict.fromkeys(tasks):
            path = tmp_path / f"whole/rollouts/step_{step}/letters.jsonl"
            group = [row["failure"] is None for row in read_rollouts(path) if row["task"] == task]
            now = sum(group) / len(group)
            before[task] = now if task not in before else (before[task] + now) / 2
    assert {f"letters/{task}": rate for task, rate in before.items()} == rates
    assert chosen["preferred"] > chosen["other"]


def test_without_a_curriculum_nothing_is_kept(tmp_path):
    one = trainer(tmp_path, 2)
    one.run()
    assert one.progress.pass_rates == {}


@pytest.mark.parametrize(
    ("weights", "share"), [((1.0, 1.0), (4, 4)), ((3.0, 1.0), (6, 2))], ids=["equal by default", "three to one"]
)
def test_two_environments_share_a_run_by_weight(tmp_path, weights, share):
    assert EnvSection(id="letters").weight == 1.0
    envs = (("letters", weights[0], 0.0), ("words", weights[1], 0.0))
    assert_resumes_alike(tmp_path, 4, 2, envs=envs)
    counts = [sum(len(tasks) // 3 for tasks in rollouts(tmp_path / "whole", name).values()) for name, _, _ in envs]
    assert tuple(counts) == share
    assert {"train/letters/reward/mean", "train/words/reward/mean"} <= set().union(*rows(tmp_path / "whole"))


def test_labels_come_equally_often(tmp_path):
    trainer(tmp_path, 3).run()
    labels = Counter("ABC"[int(task[-2:]) % 3] for tasks in rollouts(tmp_path).values() for task in tasks)
    assert labels == {"A": 6, "B": 6, "C": 6}


# --- the preflight -----------------------------------------------------------------------------------------------


def test_the_preflight_is_logged_and_changes_nothing_that_is_learned(tmp_path):
    said = []
    with_it, without = trainer(tmp_path / "with", 3, said=said), trainer(tmp_path / "without", 3, preflight_groups=0)
    with_it.run()
    without.run()
    assert all(torch.equal(adapter(with_it)[name], value) for name, value in adapter(without).items())
    assert with_it.progress == without.progress
    first, *others = rows(tmp_path / "with")
    assert first["preflight/informative_share"] > 0 and first["preflight/groups"] == 2
    assert first["preflight/tokens"] > 0 and first["time/preflight"] > 0
    assert not any(key.startswith("preflight/") for row in others for key in row)
    bare = {k: v for k, v in plain(first).items() if not k.startswith("preflight/")}
    assert bare == plain(rows(tmp_path / "without")[0])
    (told,) = [update["message"] for update in said if update["phase"] == "preflight"]
    assert "of 2 groups of the base model have spread" in told


def test_the_preflight_stops_at_the_first_step_worth_of_groups_with_spread(tmp_path):
    mixed = trainer(tmp_path, 1, envs=(("letters", 1.0, 0.75),), balance_labels=False, preflight_groups=9)
    mixed.run()
    assert 2 <= mixed.preflight.groups <= 9 and mixed.preflight.informative > 0
    assert mixed.preflight.groups % 2 == 0 or mixed.preflight.groups == 9


def test_a_run_that_cannot_learn_is_refused_unless_asked_for(tmp_path):
    dead = (("letters", 1.0, 1.0),)
    with pytest.raises(RefusedError, match="0 of 5 groups of the base model have spread") as caught:
        trainer(tmp_path / "no", 2, envs=dead, preflight_groups=5).run()
    assert "--anyway" in caught.value.hint
    assert not (tmp_path / "no/metrics.jsonl").exists()
    forced = trainer(tmp_path / "yes", 2, envs=dead, preflight_groups=5, anyway=True)
    forced.run()
    assert forced.progress.empty_steps == 2
    assert rows(tmp_path / "yes")[0]["preflight/informative_share"] == 0.0


# --- the watchdog in the loop ------------------------------------------------------------------------------------


def collapsing(folder, steps, **settings):
    """A run whose verifier, as it were, finds nothing right any more from some moment on."""
    one = trainer(folder, steps, **settings)
    env = one.envs["letters"].env
    score = env.score

    def fading(task, episode):
        made = score(task, episode)
        return made if one.progress.step < 12 else Score(0.0, {"early": 0.0}, failure=FailureClass.MODEL)

    env.score = fading
    return one


def test_a_collapse_ends_the_run_with_a_checkpoint_and_a_resume_ends_at_once(tmp_path):
    said = []
    with pytest.raises(DivergedError, match="the watchdog collapse stops the run") as caught:
        collapsing(tmp_path, 40, said=said).run()
    last = rows(tmp_path)[-1]
    assert last["watchdog/collapse"] == 1.0 and 14 <= last["step"] <= 18
    assert 'watchdog.collapse = "mark"' in caught.value.hint
    assert any(update["phase"] == "watchdog" for update in said)
    again = collapsing(tmp_path, 40)
    assert again.resume() == last["step"]
    with pytest.raises(DivergedError, match=f"after step {last['step']}"):
        again.run()
    assert rows(tmp_path)[-1] == last
