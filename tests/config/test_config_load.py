"""Reading, writing and editing run configs."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config.load import (
    check_key,
    config_sha,
    dump_config,
    known_keys,
    load_config,
    parse_config,
    render_config,
    resolved,
    set_key,
    sparse,
)
from harness.config.schema import RunConfig
from harness.core.errors import ConfigError, NotFoundError, UsageError

BASE = """\
# why this run exists
hypothesis = "A higher learning rate learns faster."

[optimizer]
learning_rate = 1e-4  # below the default

[[env]]
id = "drugprot"
args = { source = "embedded" }
"""


@pytest.fixture
def base() -> RunConfig:
    return parse_config(BASE, "base.toml")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('hypothesis = "x"\n[lora]\naplha = 64\n', "rl.toml:3: unknown key 'lora.aplha'", "did you mean 'alpha'?"),
        ('hypothesis = "x"\n[lorra]\nalpha = 64\n', "rl.toml:2: unknown key 'lorra'", "did you mean 'lora'?"),
        (
            'hypothesis = "x"\n[[env]]\nid = "a"\n[[env]]\nid = "drugprot"\n\nwieght = 2\n',
            "rl.toml:7: unknown key 'env.drugprot.wieght'",
            "did you mean 'weight'?",
        ),
        ('hypothesis = "x"\n[lora]\nalpha = "64"\n', 'rl.toml:3: lora.alpha must be a valid number, not "64"', ""),
        ('hypothesis = "x"\n[lora]\nrank = 0\n', "rl.toml:3: lora.rank must be greater than or equal to 1, not 0", ""),
        ('hypothesis = "x"\n[lora]\nrank = true\n', "lora.rank must be a valid integer, not true", ""),
        ('hypothesis = "x"\n[lora]\nrank = 16.5\n', "lora.rank must be a valid integer, not 16.5", ""),
        ('hypothesis = "x"\n[lora]\nalpha = nan\n', "rl.toml:3: lora.alpha is nan; numbers must be finite", ""),
        ('hypothesis = "x"\n[optimizer]\nname = "adam"\n', "optimizer.name must be 'adamw', 'muon' or 'sgd', not", ""),
        ("[lora]\nalpha = 64\n", "rl.toml: 'hypothesis' is missing", "add hypothesis = …"),
        ('hypothesis = " "\n', "the hypothesis is empty", ""),
        ('hypothesis = "x"\n[eval]\nitems = 10\n', "unknown key 'eval.items'", ""),
        ('hypothesis = "x"\n[lora]\nalpha = high\n', "rl.toml is not valid TOML: Invalid value (at line 3", "quotes"),
        ('hypothesis = "x"\n[lora]\nalpha = 1979-05-27\n', "dates and times are not values here", ""),
        ('hypothesis = "x"\n[[env]]\nid = "a"\n[[env]]\nid = "a"\n', "two [[env]] tables name the same", ""),
        ('hypothesis = "x"\n[lora]\nrank = 0\nalpha = -1\n', "(and 1 more)", ""),
    ],
)
def test_a_bad_config_names_place_key_and_suggestion(tmp_path, text, message, hint):
    path = tmp_path / "rl.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert str(path) in caught.value.message


def test_a_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(NotFoundError, match=r"run-009\.toml does not exist"):
        load_config(tmp_path / "run-009.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary.toml")


def test_an_integer_is_a_valid_float_and_hashes_the_same(base):
    assert set_key(base, "lora.alpha=64").lora.alpha == 64.0
    assert config_sha(set_key(base, "lora.alpha=64")) == config_sha(set_key(base, "lora.alpha=64.0"))
    assert config_sha(set_key(base, "lora.alpha=64")) != config_sha(base)


def test_written_config_is_sparse_and_reads_back(tmp_path, base):
    config = set_key(set_key(base, "lora.alpha=64"), "optimizer.learning_rate=2e-4").model_copy(
        update={"parent": "run-001"}
    )
    path = tmp_path / "run-002.toml"
    dump_config(config, path)
    assert load_config(path) == config
    assert tomllib.loads(path.read_text()) == {
        "parent": "run-001",
        "hypothesis": "A higher learning rate learns faster.",
        "lora": {"alpha": 64.0},
        "env": [{"id": "drugprot", "args": {"source": "embedded"}}],
    }


def test_editing_a_parent_keeps_its_comments(base):
    child = set_key(base, "lora.alpha=64").model_copy(update={"parent": "run-001", "lever": "size"})
    text = render_config(child, BASE)
    assert "# why this run exists" in text
    assert "learning_rate = 1e-4  # below the default" in text
    assert parse_config(text, "child") == child


def test_editing_a_parent_drops_what_is_default_again(base):
    child = set_key(base, "optimizer.learning_rate=")
    text = render_config(child, BASE)
    assert "learning_rate" not in text and "optimizer" not in text
    assert parse_config(text, "child") == child


@pytest.mark.parametrize(
    ("assignment", "read", "value"),
    [
        ("lora.alpha=64", lambda c: c.lora.alpha, 64.0),
        ("model.dtype=float32", lambda c: c.model.dtype, "float32"),
        ('model.name="org/name"', lambda c: c.model.name, "org/name"),
        ("model.name=org/name", lambda c: c.model.name, "org/name"),
        ("model.revision=" + "1" * 40, lambda c: c.model.revision, "1" * 40),
        ("train.mask_truncated=true", lambda c: c.train.mask_truncated, True),
        ("env.drugprot.weight=2", lambda c: c.env[0].weight, 2.0),
        ("env.drugprot.args.variant=published", lambda c: c.env[0].args["variant"], "published"),
        ("env.drugprot.sampling.max_tokens=32", lambda c: c.env[0].sampling.max_tokens, 32),
        ("env.drug_tool.id=drug_tool", lambda c: [e.id for e in c.env], ["drugprot", "drug_tool"]),
        ("env.drugprot=", lambda c: c.env, ()),
        ("optimizer.learning_rate=", lambda c: c.optimizer.learning_rate, 2e-4),
        ("budget.tokens=1000", lambda c: c.budget.tokens, 1000),
    ],
)
def test_set_key(base, assignment, read, value):
    assert read(set_key(base, assignment)) == value


@pytest.mark.parametrize(
    ("assignment", "error", "message", "hint"),
    [
        ("lora.alhpa=64", ConfigError, "unknown key 'lora.alhpa'", "'alpha'"),
        ("alpha=64", ConfigError, "unknown key 'alpha'", ""),
        ("lora.alpha.x=1", ConfigError, "lora.alpha", ""),
        ("lora=1", ConfigError, "lora", ""),
        ("lora.alpha", UsageError, "sets nothing", "KEY=VALUE"),
        ("parent=run-001", UsageError, "parent is not a setting", ""),
        ("env.drugprt.weight=2", ConfigError, "no environment 'drugprt'", "'drugprot'"),
        ("env.drugprot.wieght=2", ConfigError, "unknown key 'env.drugprot.wieght'", "'weight'"),
        ("env.drugprot.id=other", ConfigError, "cannot be renamed", ""),
        ("lora.alpha='64'", ConfigError, "must be a valid number", ""),
        ("lora.rnak=", ConfigError, "unknown config key 'lora.rnak'", "lora.rank"),
        ("lora.alpha=inf", ConfigError, "finite", ""),
    ],
)
def test_set_key_refuses(base, assignment, error, message, hint):
    with pytest.raises(error) as caught:
        set_key(base, assignment)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_value_cannot_smuggle_in_a_second_key(base):
    with pytest.raises(ConfigError):
        set_key(base, "lora.alpha=64\nrank = 1")


def test_known_keys_cover_the_schema_and_check_key_suggests():
    keys = known_keys()
    assert {"lora.alpha", "train.seed", "env.*.weight", "env.*.sampling.max_tokens", "budget.tokens"} <= set(keys)
    assert not {"parent", "hypothesis", "env"} & set(keys)
    for key in ("lora.alpha", "checkpoint.*", "env.*.weight", "env.drugprot.weight", "env.drugprot.args.x", "env.*"):
        assert check_key(key) == key
    for key in ("lora.alhpa", "checkpont.*", "env.drugprot.wieght", "hypothesis", ""):
        with pytest.raises(ConfigError):
            check_key(key)


def test_resolved_holds_every_default(base):
    data = resolved(base)
    assert data["lora"]["rank"] == 16 and data["env"][0]["weight"] == 1.0 and data["model"]["revision"] is None
    assert "lora" not in sparse(base)


@given(
    hypothesis=st.text(min_size=1).filter(lambda text: text.strip() and text.isprintable()),
    alpha=st.floats(min_value=1e-6, max_value=1e6),
    seed=st.integers(0, 2**40),
    argument=st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-5, 5), st.booleans()),
)
def test_any_config_survives_the_file(hypothesis, alpha, seed, argument):
    config = RunConfig.model_validate(
        {
            "hypothesis": hypothesis,
            "lora": {"alpha": alpha},
            "train": {"seed": seed},
            "env": [{"id": "drugprot", "args": {"x": argument, "nested": {"y": [1, 2]}}}],
        }
    )
    for like in (None, BASE):
        back = parse_config(render_config(config, like), "back")
        assert resolved(back) == resolved(config)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("9" * 5000, "too many digits"),
        (str(2**63), "is an integer beyond 64 bits"),
        ("[" * 100 + "]" * 100, "levels deep"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_values_beyond_every_limit_are_named(value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(f'hypothesis = "x"\n[[env]]\nid = "a"\nargs.big = {value}\n', "rl.toml")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000, "{a=" * 500 + "1" + "}" * 500, "\udcff"])
def test_a_set_value_beyond_every_limit_is_refused(base, value):
    with pytest.raises(ConfigError):
        set_key(base, f"lora.alpha={value}")


def test_a_wrong_value_gets_the_meaning_of_its_key(base):
    with pytest.raises(ConfigError) as caught:
        set_key(base, "lora.rank=0")
    assert caught.value.hint == "rank r of every adapter; the default is 16"
    with pytest.raises(ConfigError) as caught:
        set_key(base, "lora=3")
    assert "rank" in caught.value.hint


def test_a_huge_assignment_is_quoted_short(base):
    for assignment in ("a" * 10**6 + "=1", "lora.alpha=" + "x" * 10**6, "lora.alpha=" + "[" * 10**6):
        with pytest.raises(ConfigError) as caught:
            set_key(base, assignment)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("assignment", "message", "hint"),
    [
        ("lora.dropout=1", "lora.dropout must be less than 1, not 1", "would drop every adapter"),
        ("lora.alpha=1e308", "lora.alpha must be less than or equal to 1000000, not 1e+308", "the default is 32"),
        ("optimizer.beta1=1", "optimizer.beta1 must be less than 1, not 1", "no gradient would ever count"),
        ("optimizer.beta2=1.0", "optimizer.beta2 must be less than 1, not 1", "second-moment decay"),
        (
            "sampling.context=1",
            "sampling.context = 1 leaves no room for a prompt beside a completion of max_tokens",
            "",
        ),
        ("sampling.max_tokens=2048", "leaves no room for a prompt beside a completion of max_tokens = 2048", ""),
        ("env.drugprot.sampling.max_tokens=4096", "no room for a prompt beside a completion of max_tokens = 4096", ""),
    ],
)
def test_a_value_that_could_not_train_is_refused_when_it_is_set(base, assignment, message, hint):
    with pytest.raises(ConfigError) as caught:
        set_key(base, assignment)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_values_just_inside_the_bounds_are_taken(base):
    for assignment in ("lora.dropout=0.999", "lora.alpha=1e6", "optimizer.beta1=0.9999", "sampling.context=65"):
        set_key(base, assignment)
