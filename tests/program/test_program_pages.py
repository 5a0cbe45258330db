"""Finding a program and reading its pages."""

import subprocess
import sys

import pytest

from harness.core.canonical import sha256_hex
from harness.core.errors import ConfigError, InfraError, NotFoundError, UsageError
from harness.program import Program, check_documents, init_program, protocol_hashes, read_context, read_goal, read_plan
from harness.program.documents import Context, Goal, Plan, Range, parse_page, toml_block
from harness.program.prompts import prompt_sha, read_prompt


@pytest.fixture
def program(tmp_path):
    init_program(tmp_path / "prog", git=False)
    return Program(tmp_path / "prog")


def test_find_walks_up(program, monkeypatch):
    deep = program.root / "analysis" / "run-001" / "plots"
    deep.mkdir(parents=True)
    assert Program.find(deep, {}) == program
    monkeypatch.chdir(deep)
    monkeypatch.delenv("HARNESS_PROGRAM", raising=False)
    assert Program.find() == program


def test_environment_variable_overrides(program, tmp_path):
    assert Program.find(tmp_path, {"HARNESS_PROGRAM": str(program.root)}) == program
    with pytest.raises(NotFoundError, match=r"GOAL\.md"):
        Program.find(program.root, {"HARNESS_PROGRAM": str(tmp_path)})


def test_outside_a_program_the_hint_is_init(tmp_path):
    with pytest.raises(NotFoundError) as caught:
        Program.find(tmp_path, {})
    assert "harness init" in caught.value.hint


@pytest.mark.parametrize("name", ["GOAL.md", "CONTEXT.md", "PLAN.md"])
def test_a_missing_page_is_named(program, name):
    (program.root / name).unlink()
    with pytest.raises(NotFoundError, match=name) as caught:
        Program.find(program.root, {})
    assert "git checkout" in caught.value.hint
    with pytest.raises(NotFoundError, match=name):
        protocol_hashes(program)
    with pytest.raises(NotFoundError, match=name):
        check_documents(program)


@pytest.mark.parametrize("run", ["run-1", "../run-001", "run-0001", "run-001/..", "RUN-001", ""])
def test_paths_refuse_anything_but_a_run_id(program, run):
    for path in (program.run_dir, program.config_path, program.analysis_dir):
        with pytest.raises(UsageError):
            path(run)


def test_paths(program):
    assert program.relative(program.config_path("run-012")) == "rl/run-012.toml"
    assert program.relative(program.run_dir("run-012")) == "outputs/run-012"
    assert program.relative(program.analysis_dir("run-1200")) == "analysis/run-1200"
    with pytest.raises(UsageError):
        program.prompt_path("drugprot", "../../etc")


def test_the_templates_say_what_new_programs_need(program):
    goal, context, plan = check_documents(program)
    assert goal.gate.baseline == "base_run_prompt" and goal.gate.confidence == 0.95
    assert [(e.id, e.metric, e.min_gain, e.not_below) for e in goal.env] == [("drugprot", "reward", 0.0, ("accuracy",))]
    (evaluated,) = context.eval.env
    assert evaluated.args == {"source": "embedded", "variant": "hardened"}
    assert (evaluated.items, evaluated.samples, evaluated.split) == (120, 1, "heldout")
    assert (evaluated.max_tokens, evaluated.temperature, context.eval.interval) == (40, 0.7, 15)
    assert set(context.frozen) == {"model.name", "optimizer.name", "backend.name", "backend.engine"}
    assert context.frozen_values()["model.name"] == "smollm2-135m"
    assert plan.range_of("lora.alpha").holds(64) and plan.range_of("env.drugprot.weight").holds(3.0)
    assert plan.range_of("model.name") is None


def test_hashes_are_of_the_bytes(program):
    assert protocol_hashes(program)["goal"] == sha256_hex(program.goal.read_bytes())
    before = protocol_hashes(program)
    program.plan.write_text(program.plan.read_text() + " ")
    after = protocol_hashes(program)
    assert before["plan"] != after["plan"] and before["goal"] == after["goal"]


PAGE = "# Goal\n\nprose\n\n```toml\n{}\n```\n\nmore\n"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("# Goal\n\nno block\n", "GOAL.md has no ```toml block", "exactly one block"),
        (PAGE.format("") + PAGE.format(""), "2 ```toml blocks, on lines 5 and 14", "exactly one block"),
        ("```toml\nx = 1\n", "never closed", ""),
        (PAGE.format("[gaet]\n"), "GOAL.md:6: unknown key 'gaet' (and 1 more)", "'gate'"),
        (
            PAGE.format('[[env]]\nid = "drugprot"\nthreshold = 0.2\nmin_gian = 0.1'),
            "GOAL.md:9: unknown key 'env.drugprot.min_gian'",
            "did you mean 'min_gain'?",
        ),
        (PAGE.format('[[env]]\nid = "drugprot"'), "GOAL.md:6: 'env.drugprot.threshold' is missing", ""),
        (PAGE.format('[[env]]\nid = "d"\nthreshold = "0.2"'), "GOAL.md:8: env.d.threshold must be a valid number", ""),
        (PAGE.format('[[env]]\nid = "d"\nthreshold = nan'), "GOAL.md:8: env.d.threshold is nan", ""),
        (PAGE.format("[gate]\nconfidence = 95"), "GOAL.md", ""),
        (PAGE.format("x = "), "GOAL.md is not valid TOML: Invalid value (at line 6", ""),
        (PAGE.format('[gate]\nbaseline = "base"\n[[env]]\nid="d"\nthreshold=0'), "'base_run_prompt'", ""),
        (PAGE.format("env = []"), "env", ""),
    ],
)
def test_a_bad_page_names_line_key_and_suggestion(text, message, hint):
    with pytest.raises(ConfigError) as caught:
        parse_page(Goal, text, "GOAL.md")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_other_blocks_are_prose():
    text = "````markdown\n```toml\nnot = 'this'\n```\n````\n~~~text\n```toml\n~~~\n```toml\nx = 1\n```\n"
    assert toml_block(text, "PLAN.md") == ("x = 1", 10)
    assert toml_block("```toml title=x\r\nx = 1\r\n```\r\n", "PLAN.md")[0].strip() == "x = 1"


def context_page(frozen: str) -> str:
    return PAGE.format(
        f'[model]\nname = "m"\n[[eval.env]]\nid = "drugprot"\nitems = 1\nmax_tokens = 8\n[eval]\n[frozen]\n{frozen}'
    ).replace("[eval]\n", "")


def test_frozen_takes_dotted_and_nested_keys_and_refuses_unknown_ones():
    quoted = parse_page(Context, context_page('"optimizer.name" = "adamw"'), "CONTEXT.md")
    nested = parse_page(Context, context_page('optimizer.name = "adamw"'), "CONTEXT.md")
    assert quoted.frozen == nested.frozen == {"optimizer.name": "adamw"}
    with pytest.raises(ConfigError, match=r"unknown config key 'optimiser.name'") as caught:
        parse_page(Context, context_page('"optimiser.name" = "adamw"'), "CONTEXT.md")
    assert "optimizer.name" in caught.value.message


def test_plan_refuses_unknown_keys():
    with pytest.raises(ConfigError, match=r"lora.alhpa.*lora.alpha"):
        parse_page(Plan, PAGE.format('[search_space]\n"lora.alhpa" = [1]'), "PLAN.md")
    with pytest.raises(ConfigError, match=r"tran.seed"):
        parse_page(Plan, PAGE.format('nuisance = ["tran.seed"]'), "PLAN.md")
    with pytest.raises(ConfigError, match=r"unknown key 'search_space.lora.rank.maximum'"):
        parse_page(Plan, PAGE.format('[search_space]\n"lora.rank" = { maximum = 3 }'), "PLAN.md")


@pytest.mark.parametrize(
    ("spec", "inside", "outside"),
    [
        ({"min": 1, "max": 2}, [1, 1.5, 2], [0.99, 2.01, "1", True, None, float("nan")]),
        ({"min": 1}, [1, 1e9], [0]),
        ({"max": 1}, [-5, 1], [2]),
        ([16, 32], [16, 16.0, 32], [17, "16", True, None]),
        ([True, False], [True, False], [1, 0]),
        ({}, ["anything", None, 3], []),
    ],
)
def test_ranges(spec, inside, outside):
    allowed = Range.model_validate(spec)
    assert all(allowed.holds(value) for value in inside)
    assert not any(allowed.holds(value) for value in outside)


def test_goal_for_an_environment_without_evaluation(program):
    program.goal.write_text(program.goal.read_text().replace('id = "drugprot"', 'id = "drugprt"'))
    with pytest.raises(ConfigError, match=r"drugprt.*does not evaluate") as caught:
        check_documents(program)
    assert "drugprot" in caught.value.hint


def test_pages_read_one_by_one(program):
    assert read_goal(program).env[0].threshold == 0.2
    assert read_context(program).model.revision is None
    assert "train.microbatch_tokens" in read_plan(program).nuisance


def test_prompts(program):
    assert read_prompt(program, "drugprot", "shipped") is None
    with pytest.raises(NotFoundError, match=r"p1\.toml"):
        read_prompt(program, "drugprot", "p1")
    path = program.prompt_path("drugprot", "p1")
    path.parent.mkdir(parents=True)
    path.write_text('source = "by hand"\n[components]\nsystem = "Answer."\n')
    assert read_prompt(program, "drugprot", "p1") == {"system": "Answer."}
    path.write_text('[components]\ndemonstrations = ""\n')  # a text may be taken away
    assert read_prompt(program, "drugprot", "p1") == {"demonstrations": ""}
    path.write_text('[component]\nsystem = "x"\n')
    with pytest.raises(ConfigError, match=r"unknown key 'component'|'components' is missing"):
        read_prompt(program, "drugprot", "p1")
    shipped = {"system": "A", "user": "B"}
    assert prompt_sha(shipped, {"system": "A"}) == prompt_sha(shipped) != prompt_sha(shipped, {"system": "C"})


def test_the_paths_of_a_program_load_no_parser():
    code = "import sys, harness.program.model; sys.exit(any(m in sys.modules for m in ('pydantic', 'tomlkit')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_in_the_place_of_a_page_is_named(program):
    program.goal.unlink()
    program.goal.mkdir()
    with pytest.raises(InfraError, match=r"GOAL\.md") as caught:
        protocol_hashes(program)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["loop", "~no-such-user/x", "x" * 5000])
def test_an_impossible_program_folder_is_not_found(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((NotFoundError, OSError)):
        Program.find(tmp_path, {"HARNESS_PROGRAM": name})
