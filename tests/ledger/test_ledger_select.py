"""Columns, conditions and orders over runs; the parent tree; metrics as a table."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.errors import NotFoundError, UsageError
from harness.ledger import fold
from harness.ledger.events import Actor, NewEvent, make_event
from harness.ledger.lineage import family, forest
from harness.ledger.select import Columns, flat_config
from harness.ledger.tables import COLUMNS, metric_rows, metrics_table, runs_table, table

NAN = {"$non_finite": "nan"}


def interval(mean, width=0.1):
    return {"mean": mean, "low": mean - width, "high": mean + width}


def evaluated(reward, gain, env="drugprot"):
    means = {"reward": interval(reward) if isinstance(reward, float) else {"mean": reward}, "accuracy": interval(0.5)}
    data = {"attempt": 1, "subject": "policy", "step": 10, "env": env, "prompt": "run", "n": 120, "means": means}
    return data | {"gain": {"reward": interval(gain)}}


def state_of(runs):
    """Fold runs given as name → events (kind, data)."""
    made = []
    for name, events in runs.items():
        for kind, data in events:
            number = len(made)
            at = f"2026-01-01T00:00:{number // 1000:02d}.{number % 1000:03d}Z"
            new = NewEvent(name, kind, data, actor=Actor("agent", "tester"))
            made.append(make_event(new, id=f"{number:026d}", at=at))
    return fold(made)


def created(hypothesis="h", parent=None, **config):
    return ("created", {"type": "training", "hypothesis": hypothesis, "parent": parent, "basis": {"config": config}})


@pytest.fixture
def state():
    return state_of(
        {
            "run-001": [created(lora={"alpha": 16.0}), ("evaluated", evaluated(0.2, 0.05))],
            "run-002": [
                created("Größe", "run-001", lora={"alpha": 64}, env=[{"id": "drugprot", "args": {"source": "x"}}]),
                ("evaluated", evaluated(0.4, 0.3)),
                ("decided", {"decision": "keep", "reason": "the gain holds"}),
                ("tagged", {"tag": "paper"}),
            ],
            "run-010": [created(parent="run-001"), ("decided", {"decision": "reject", "reason": "worse"})],
            "run-1000": [created(), ("evaluated", evaluated(NAN, 0.2))],
        }
    )


def columns_of(state):
    fixed = {
        "run": lambda run: run.run,
        "decision": lambda run: run.decision,
        "hypothesis": lambda run: run.hypothesis,
        "champion": lambda run: run.run == state.champion,
        "tags": lambda run: list(run.tags),
        "created_at": lambda run: run.created_at,
    }
    return Columns(state.runs.values(), fixed, {"decision": ("keep", "reject", "none")})


def chosen(state, *conditions, sort=""):
    columns = columns_of(state)
    parsed = [columns.condition(text) for text in conditions]
    runs = [run for run in state.runs.values() if all(condition.matches(run) for condition in parsed)]
    return [run.run for run in columns.ordered(runs, sort)]


@pytest.mark.parametrize(
    ("condition", "runs"),
    [
        ("decision=keep", "run-002"),
        ("decision == keep", "run-002"),
        ("decision!=keep", "run-001 run-010 run-1000"),
        ("decision=none", "run-001 run-1000"),
        ("reward>0.2", "run-002"),
        ("reward>=0.2", "run-001 run-002"),
        ("reward<0.3", "run-001"),
        ("gain.low>0", "run-002 run-1000"),
        ("gain.drugprot.low > 0.15", "run-002"),
        ("accuracy=0.5", "run-001 run-002 run-1000"),
        ("accuracy_gain=none", "run-001 run-002 run-010 run-1000"),
        ("hypothesis~GRÖSSE", "run-002"),
        ("hypothesis~größe", "run-002"),
        ("hypothesis=Größe", "run-002"),
        ("tags=paper", "run-002"),
        ("tags~pap", "run-002"),
        ("champion=no", "run-001 run-002 run-010 run-1000"),
        ("champion=yes", ""),
        ("lora.alpha=16", "run-001"),
        ("lora.alpha>16", "run-002"),
        ("env.drugprot.args.source=x", "run-002"),
        ("created_at>2026-01-01T00:00:00.004Z", "run-010 run-1000"),
        ("reward!=nan", "run-001 run-002 run-010 run-1000"),
    ],
)
def test_conditions(state, condition, runs):
    assert chosen(state, condition) == runs.split()


def test_conditions_must_all_hold(state):
    assert chosen(state, "reward>0.1", "decision=none") == ["run-001"]


@pytest.mark.parametrize(
    ("keys", "runs"),
    [
        ("reward", "run-001 run-002 run-010 run-1000"),
        ("-reward", "run-002 run-001 run-010 run-1000"),  # without a number, NaN included, last either way
        ("-gain", "run-002 run-1000 run-001 run-010"),
        ("-run", "run-1000 run-010 run-002 run-001"),  # by number, not by spelling
        ("decision,-run", "run-002 run-010 run-1000 run-001"),
        ("lora.alpha", "run-001 run-002 run-010 run-1000"),
    ],
)
def test_orders(state, keys, runs):
    assert chosen(state, sort=keys) == runs.split()


@pytest.mark.parametrize(
    ("condition", "message", "hint"),
    [
        ("decison=keep", "no column 'decison'", "'decision'"),
        ("decision=kept", "no decision 'kept'", "'keep'"),
        ("reward>high", "compared with a number", "--where"),
        ("reward", "is no condition", "operators"),
        ("=3", "is no condition", "operators"),
        ("rewrd>1", "no column 'rewrd'", "'reward'"),
        ("lora.alpa=3", "no column 'lora.alpa'", "'lora.alpha'"),
    ],
)
def test_wrong_conditions_are_answered_with_the_nearest(state, condition, message, hint):
    with pytest.raises(UsageError) as caught:
        chosen(state, condition)
    assert message in caught.value.message
    assert hint in caught.value.hint


def under(reward, **binding):
    return ("evaluated", evaluated(reward, 0.1) | {"items_sha": "a", "verifier": "1"} | binding)


def imported(name):
    return ("imported", {"type": "import", "hypothesis": name, "format": "wandb-csv", "source": {"name": name}})


def test_an_order_by_a_metric_puts_what_does_not_compare_last():
    state = state_of(
        {
            "run-001": [created(), under(0.9, items_sha="b")],
            "run-002": [created(), under(0.3)],
            "run-003": [imported("x"), under(0.8)],
            "run-004": [created(), under(0.5)],
            "run-005": [created()],
            "run-006": [imported("y"), under(0.95)],
        }
    )
    assert chosen(state, sort="-reward") == ["run-004", "run-002", "run-001", "run-006", "run-003", "run-005"]
    assert chosen(state, sort="reward") == ["run-002", "run-004", "run-001", "run-003", "run-006", "run-005"]
    assert chosen(state, sort="-reward.drugprot.low")[:2] == ["run-004", "run-002"]
    assert chosen(state, sort="-run") == [f"run-00{number}" for number in (6, 5, 4, 3, 2, 1)]
    columns = columns_of(state)
    runs = list(state.runs.values())
    assert columns.incomparable(runs, "decision,-reward") == ["run-001", "run-003", "run-006"]
    assert columns.incomparable(runs, "-run") == columns.incomparable(runs, "") == []


def test_imports_of_one_source_compare_with_each_other_when_the_program_has_nothing_else():
    state = state_of({f"run-00{i}": [imported("x"), under(0.1 * i)] for i in (1, 3, 2)} | {"run-004": [created()]})
    assert chosen(state, sort="-reward") == ["run-003", "run-002", "run-001", "run-004"]
    assert columns_of(state).incomparable(list(state.runs.values()), "-reward") == []


def test_a_metric_of_several_environments_is_named_not_guessed(state):
    state = state_of(
        {"run-001": [created(), ("evaluated", evaluated(0.2, 0.1)), ("evaluated", evaluated(0.9, 0.5, "tool"))]}
    )
    with pytest.raises(UsageError, match="value per environment") as caught:
        chosen(state, "reward>0.5")
    assert "reward.drugprot, reward.tool" in caught.value.hint
    with pytest.raises(UsageError, match="value per environment"):
        chosen(state, sort="-gain")
    assert chosen(state, "reward.tool>0.5", "reward.drugprot<0.5") == ["run-001"]
    shown = columns_of(state).find("reward").show(state.runs["run-001"])
    assert {env: value["mean"] for env, value in shown.items()} == {"drugprot": 0.2, "tool": 0.9}


def test_no_evals_at_all_is_an_empty_column_not_an_error():
    state = state_of({"run-001": [created()]})
    assert chosen(state, "reward>0") == []
    assert chosen(state, "gain.low=none") == ["run-001"]


@settings(max_examples=25, deadline=None)
@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_any_json_is_a_config(config):
    assert all(isinstance(key, str) for key in flat_config(config))


def test_a_last_value_of_an_import_is_a_column():
    state = state_of({"run-001": [("imported", {"settings": {"lr": 3e-4}, "final": {"train/x/reward/mean": 0.7}})]})
    assert chosen(state, "train/x/reward/mean>0.5", "lr=0.0003") == ["run-001"]


# The parent tree


def test_dead_ends_branch_off_and_the_longest_line_goes_straight_on():
    nodes = forest({"a": None, "b": "a", "c": "a", "d": "b", "e": "d", "f": "d", "x": None})
    assert [(node.prefix + node.run, node.depth) for node in nodes] == [
        ("a", 0),
        ("├─c", 1),
        ("b", 1),
        ("d", 2),
        ("├─e", 3),
        ("f", 3),
        ("x", 0),
    ]


def test_a_long_campaign_stays_narrow():
    parents = {f"run-{n:05}": f"run-{n - 1:05}" if n else None for n in range(5000)}
    nodes = forest(parents)
    assert [node.run for node in nodes] == list(parents)
    assert {node.lane for node in nodes} == {0}
    assert nodes[-1].depth == 4999


def test_a_bush_is_cut_in_text_but_not_in_the_data():
    parents: dict[str, str | None] = {"b0": None}
    for n in range(1, 31):  # the older bush branches off a new line that is as long as it is high
        parents |= {f"b{n}": None, f"b{n - 1}": f"b{n}"}
        parents |= {f"m{n}-{k}": f"m{n}-{k - 1}" if k else f"b{n}" for k in range(2 * n)}
    nodes = forest(parents)
    assert max(node.lane for node in nodes) == 30
    assert max(len(node.prefix) for node in nodes) == 2 * 21


def test_unknown_parents_and_circles_do_not_lose_runs():
    nodes = forest({"a": "gone", "b": "c", "c": "d", "d": "b", "e": "e"})
    assert sorted(node.run for node in nodes) == ["a", "b", "c", "d", "e"]
    assert {node.run: node.missing for node in nodes if node.missing} == {"a": "gone", "b": "c", "e": "e"}


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 30), st.none() | st.integers(0, 30)))
def test_every_run_is_shown_once_below_its_parent(links):
    parents = {str(run): None if parent is None else str(parent) for run, parent in links.items()}
    nodes = forest(parents)
    assert sorted(node.run for node in nodes) == sorted(parents)
    seen = {}
    for node in nodes:
        assert node.parent is None or seen[node.parent].depth == node.depth - 1
        assert node.parent is None or node.lane == seen[node.parent].lane + node.branch
        seen[node.run] = node


def test_family_is_ancestors_and_descendants():
    parents = {"a": None, "b": "a", "c": "b", "d": "a", "e": "c"}
    assert list(family(parents, "b")) == ["a", "b", "c", "e"]
    assert list(family({"a": "b", "b": "a"}, "a")) == ["a", "b"]
    with pytest.raises(NotFoundError):
        family(parents, "z")


# Tables


def test_cells_have_the_type_of_their_column():
    made = table("evals", [{"run": 3, "step": 2.5, "n": 1 << 70, "mean": NAN, "last": "yes", "low": 1}])
    row = dict(zip(made.columns, made.rows[0], strict=True))
    assert (row["run"], row["step"], row["n"], row["last"], row["low"]) == ("3", None, None, None, 1.0)
    assert row["mean"] != row["mean"]
    assert len(made.rows[0]) == len(COLUMNS["evals"])


def test_runs_on_several_environments_have_no_single_reward(state):
    both = {"run-001": [created(), ("evaluated", evaluated(0.2, 0.1)), ("evaluated", evaluated(0.9, 0.5, "tool"))]}
    for found, reward in ((state, 0.2), (state_of(both), None)):
        made = runs_table(found, lambda run: run.status)
        assert dict(zip(made.columns, made.rows[0], strict=True))["reward"] == reward


def test_metrics_of_both_files_and_of_a_resumed_run(tmp_path):
    rows = ['{"step":1,"attempt":1,"a":1.0,"time":5}', '{"step":2,"attempt":1,"a":2.0}', '{"step":2,"att', "[1]", "3"]
    rows += ['{"step":2,"attempt":2,"a":{"$non_finite":"inf"},"b":7}', '{"step":true,"a":1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    found = list(metric_rows("run-001", tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["metric"], row["value"], row["superseded"]) for row in found] == [
        (1, "a", 1.0, False),
        (2, "a", 2.0, True),
        (2, "a", float("inf"), False),
        (2, "b", 7.0, False),
    ]
    (tmp_path / "metrics.csv").write_text("step,a,b\n1,0.5,\nx,1,2\n3,nan,=cmd\n")
    made = metrics_table([("run-002", tmp_path / "metrics.csv")])
    assert [row[1:5] for row in made.rows[:1]] == [(1, None, "a", 0.5)]
    assert len(made.rows) == 2
