"""list with conditions and columns, diff, log, lineage, query, export: what they say and how they refuse."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET

import pytest

from harness.cli.drawing import lineage_svg, xml_text
from harness.cli.log import summary
from harness.cli.query import plain
from harness.cli.spreadsheet import cell_text, csv_text
from harness.core.types import FailureClass
from harness.evaluation.records import ItemRecord, write_items
from harness.evaluation.summary import summarise
from harness.ledger import Ledger
from tests.payloads import PAYLOADS

SAFE = [text for text in PAYLOADS if "\ud800" not in text]  # a ledger refuses lone surrogates
SVG = "{http://www.w3.org/2000/svg}"


def evaluation(reward, low, env="drugprot", **more):
    mean = {"mean": reward, "low": low, "high": reward + 0.1}
    data = {"attempt": 1, "subject": "policy", "step": 10, "env": env, "prompt": "run", "n": 100, "requested": 100}
    return (
        data | {"means": {"reward": mean, "accuracy": mean}, "gain": {"reward": mean | {"mean": reward - 0.2}}} | more
    )


@pytest.fixture
def campaign(program):
    """run-001 of the template, a kept child with items, a rejected child, and an imported run."""
    ledger = Ledger(program.ledger)
    basis = {"config": {"lora": {"alpha": 64.0}}}

    def create(run, parent, hypothesis, **data):
        data = {"type": "training", "parent": parent, "hypothesis": hypothesis, "basis": basis} | data
        ledger.append(run, "created", data)

    create("run-002", "run-001", "Alpha 64 learns faster")
    ledger.append("run-002", "evaluated", evaluation(0.6, 0.5))
    ledger.append("run-002", "decided", {"decision": "keep", "reason": "the gain holds"})
    create("run-003", "run-002", '=HYPERLINK("x") \x1b[31m<b>@all</b>')
    ledger.append("run-003", "decided", {"decision": "reject", "reason": "-1 point"})
    settings = {"lr": 0.0003, "env": "x"}
    imported = {"type": "import", "parent": "run-003", "hypothesis": "imported: baseline", "settings": settings}
    ledger.append("run-004", "imported", imported | {"final": {"train/x/reward/mean": 0.7}})
    return program


def test_list_chooses_runs_columns_and_order(cli, campaign):
    document = cli("list", "--where", "gain.low>0", "--sort", "-reward", "--json").document
    assert [row["run"] for row in document["rows"]] == ["run-002", "run-001"]
    assert document["counts"] == {"total": 4, "matching": 2, "shown": 2}
    usual = {row["run"]: row for row in cli("list", "--json").document["rows"]}
    assert document["rows"] == [usual["run-002"], usual["run-001"]]
    chosen = cli("list", "--columns", "decision,reward,accuracy_gain,lora.alpha", "--sort", "run", "--json").document
    assert list(chosen["rows"][0]) == ["run", "decision", "reward", "accuracy_gain", "lora.alpha"]
    assert [row["lora.alpha"] for row in chosen["rows"]] == [32.0, 64.0, 64.0, None]
    assert chosen["rows"][1]["reward"]["drugprot"]["mean"] == 0.6
    text = cli("list", "--columns", "run,decision,reward,gain", "--kind", "training", "--limit", "2").out
    assert text.splitlines() == [
        "run      decision  reward    gain",
        "run-003  reject         -       -",
        "run-002  keep       0.600  +0.400",
        "2 of 3 shown; --limit N or --all shows more",
    ]


def test_an_order_says_what_does_not_compare(cli, campaign):
    ledger = Ledger(campaign.ledger)
    ledger.append("run-003", "evaluated", evaluation(0.5, 0.4))
    ledger.append("run-002", "evaluated", evaluation(0.7, 0.6, step=20, protocol={"samples": 9}))
    ledger.append("run-004", "evaluated", evaluation(0.9, 0.8))
    document = cli("list", "--sort", "-reward", "--json").document
    assert [row["run"] for row in document["rows"]] == ["run-003", "run-001", "run-002", "run-004"]
    assert document["not_comparable"] == ["run-002", "run-004"]
    assert cli("list", "--sort", "-reward", "--columns", "run,reward").out.splitlines()[-2:] == [
        "run-002: measured under another protocol: not comparable with the runs above",
        "run-004: imported: not comparable with the runs above",
    ]
    assert cli("list", "--sort", "-run", "--json").document["not_comparable"] == []
    assert "not comparable" not in cli("list", "--where", "reward>0").out


def test_imported_runs_wait_for_no_decision(cli, campaign):
    status = cli("status", "--json").document
    assert status["undecided"] == ["run-001"]
    assert status["next"] == 'harness new-run --hypothesis "…"'  # run-003 was rejected, and run-004 is over
    assert "run-004" not in cli("status").out


def test_list_combines_its_short_options_with_conditions(cli, campaign):
    rows = cli("list", "--decision", "keep", "--where", "reward>0.5", "--json").document["rows"]
    assert [row["run"] for row in rows] == ["run-002"]
    assert "no run matches" in cli("list", "--tag", "nobody").out
    assert cli("list", "--kind", "import", "--json").document["counts"]["matching"] == 1
    assert cli("list", "--where", "train/x/reward/mean>0.5", "--json").document["counts"]["matching"] == 1


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--columns", "run,rewrd"], "did you mean 'reward'?"),
        (["--where", "decison=keep"], "did you mean 'decision'?"),
        (["--where", "status=complete"], "did you mean 'completed'?"),
        (["--kind", "trainin"], "did you mean 'training'?"),
        (["--sort", "-gian"], "did you mean 'gain'?"),
        (["--where", "reward"], "operators"),
    ],
)
def test_wrong_names_are_answered_with_the_nearest(cli, campaign, argv, hint):
    answer = cli("list", *argv, "--json")
    assert answer.code == 2
    assert hint in answer.document["error"]["hint"]


def test_diff_pairs_the_items_of_both_runs(cli, campaign):
    ledger = Ledger(campaign.ledger)
    for run, right in (("run-002", 30), ("run-003", 10)):
        items = [
            ItemRecord(f"t{n}", f"t{n}", 0, float(n < right), {}, {}, None if n < right else FailureClass.MODEL)
            for n in range(40)
        ]
        name = f"analysis/{run}/evals/step_20.policy.drugprot.jsonl"
        sha = write_items(campaign.root / name, items)
        more = {"step": 20, "file": name, "file_sha": sha, "items_sha": "i", "verifier": "1"}
        ledger.append(run, "evaluated", evaluation(0, 0) | more | summarise(items, requested=40))
    document = cli("diff", "run-002", "run-003", "--json").document
    (row,) = [row for row in document["evals"] if row["metric"] == "reward"]
    assert (row["old"]["mean"], row["new"]["mean"], row["difference"]["mean"]) == (0.75, 0.25, -0.5)
    assert row["difference"]["high"] < 0
    assert (document["old"], document["new"], document["compared"]) == ("run-002", "run-003", "basis")
    assert document["decisions"]["run-003"]["decision"] == "reject"
    text = cli("diff", "run-002", "run-003").out
    interval = "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**row["difference"])
    assert re.search(rf"{re.escape(interval)} +0/20/20\n", text)
    assert "run-003  reject: -1 point" in text


def test_diff_of_an_imported_run_compares_what_there_is(cli, campaign):
    document = cli("diff", "run-002", "run-004", "--json").document
    assert document["compared"] == "config"
    assert {row["key"]: row["new"] for row in document["rows"]}["lr"] == 0.0003
    assert {row["metric"]: row["new"] for row in document["training"]} == {"train/x/reward/mean": 0.7}
    assert [row["why"] for row in document["evals"]] == ["only one of the two was evaluated on this environment"] * 2
    Ledger(campaign.ledger).append("run-005", "imported", {"type": "import"})
    assert "no change set: a run has no config on record" in cli("diff", "run-002", "run-005").out


def test_log_is_newest_first_filtered_and_capped(cli, campaign):
    document = cli("log", "--json").document
    times = [row["at"] for row in document["rows"]]
    assert times == sorted(times, reverse=True)
    assert document["rows"][0]["run"] == "run-004"
    assert {"id", "run", "kind", "at", "actor", "data", "sha"} == set(document["rows"][0])
    decided = cli("log", "--kind", "decided", "--json").document
    assert [row["data"]["decision"] for row in decided["rows"]] == ["reject", "keep"]
    one = cli("log", "run-002", "--limit", "1", "--json").document
    assert (one["counts"], one["truncated"]) == ({"matching": 3, "shown": 1}, True)
    assert "1 of 3 shown" in cli("log", "run-002", "--limit", "1").out
    lines = cli("log", "--all", "--jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == document["rows"]
    assert len(cli("log").out.splitlines()) == len(lines) + 1
    wrong = cli("log", "--kind", "decidd", "--json")
    assert wrong.code == 2
    assert "'decided'" in wrong.document["error"]["hint"]
    assert cli("log", "run-001", "--kind", "amended").out == "no event matches\n"


def test_every_kind_of_event_has_one_line():
    told = {
        "created": summary("created", {"parent": "run-001", "hypothesis": "h"}),
        "started": summary("started", {"attempt": 2, "host": "x", "pid": 1, "resumed_from": 0}),
        "finished": summary("finished", {"attempt": 1, "outcome": "failed", "failure": "infra", "wall_s": 120}),
        "gated": summary("gated", {"step": 3, "verdict": "fail", "gates": [{"name": "heldout", "verdict": "fail"}]}),
        "tagged": summary("tagged", {"tag": "paper", "removed": True}),
        "proposed": summary("proposed", {"hypothesis": "try 64"}),
        "renumbered": summary("renumbered", {"from": "run-002", "to": "run-003"}),
        "new_kind": summary("new_kind", {"a": 1}),
        "evaluated": summary("evaluated", {"means": 3}),
    }
    assert told == {
        "created": "from run-001: h",
        "started": "attempt 2 on x, pid 1, resumed from step 0",
        "finished": "attempt 1 failed after 2.0 min, infra failure",
        "gated": "step 3: fail (heldout fail)",
        "tagged": "removed paper",
        "proposed": "try 64",
        "renumbered": "from run-002 to run-003",
        "new_kind": '{"a": 1}',
        "evaluated": '{"means": 3}',
    }
    assert len(summary("noted", {"text": "x" * 5000})) == 200


def test_lineage_shows_the_tree_and_draws_it(cli, campaign, tmp_path):
    rows = cli("lineage", "--json").document["rows"]
    assert [(row["run"], row["parent"], row["depth"]) for row in rows] == [
        ("run-001", None, 0),
        ("run-002", "run-001", 1),
        ("run-003", "run-002", 2),
        ("run-004", "run-003", 3),
    ]
    assert re.search(r"^o run-002 +keep +0\.600 +\+0\.400  Alpha 64 learns faster$", cli("lineage").out, re.MULTILINE)
    target = tmp_path / "tree.svg"
    document = cli("lineage", "run-002", "--limit", "1", "--svg", target, "--json").document
    assert (document["svg"], document["counts"]["shown"]) == (str(target), 1)
    drawn = target.read_bytes()
    texts = [element.text for element in ET.fromstring(drawn).iter(f"{SVG}text")]  # noqa: S314
    assert {"run-001", "run-002", "run-003", "run-004", "keep", "reject", "+0.400"} <= set(texts)
    assert cli("lineage", "--svg", target).code == 2
    assert cli("lineage", "--svg", target, "--force").code == 0
    assert target.read_bytes() == drawn


def test_an_answer_never_replaces_what_belongs_to_the_program(cli, campaign, tree):
    before = tree(campaign.root)
    (campaign.root / "link.svg").symlink_to(campaign.ledger)
    for name in ("runs.jsonl", "GOAL.md", "THREAD.md", "rl/run-001.toml", "outputs/x.svg", "link.svg"):
        for argv in (["lineage", "--svg"], ["export", "--out"]):
            answer = cli(*argv, name, "--force", "--json")
            assert answer.document["error"]["kind"] == "refused", name
    assert cli("export", "--out", "analysis").code == 2
    (campaign.root / "link.svg").unlink()
    assert tree(campaign.root) == before


def svg_rows(text):
    row = {"run": "run-001", "status": text, "decision": text, "gain": {text: {"mean": 0.1}}, "hypothesis": text}
    row |= {"reward": {}, "kind": "training", "missing_parent": text, "parent": text, "lane": 0, "champion": True}
    return [row]


@pytest.mark.parametrize("text", [*PAYLOADS, "\ufffe\uffff\ufdd0", "]]>", "&nbsp;", "\x0b\x0c"])
def test_hostile_text_in_a_drawing_stays_text(text):
    drawn = lineage_svg(svg_rows(text))
    root = ET.fromstring(drawn)  # noqa: S314
    plain_root = ET.fromstring(lineage_svg(svg_rows("plain")))  # noqa: S314
    allowed = {f"{SVG}{name}" for name in ("svg", "title", "rect", "circle", "path", "text", "g")}
    assert {element.tag for element in root.iter()} <= allowed
    names = {name for element in root.iter() for name in element.attrib}
    assert names == {name for element in plain_root.iter() for name in element.attrib}
    assert drawn.encode("utf-8") == lineage_svg(svg_rows(text)).encode("utf-8")
    assert xml_text(text) == xml_text(text).strip("\n")


def test_an_empty_tree_is_a_drawing_too(cli, empty_program):
    assert "no runs yet" in cli("lineage").out
    assert cli("lineage", "--svg", "x.svg").code == 0
    assert ET.parse(empty_program.root / "x.svg").getroot().tag == f"{SVG}svg"  # noqa: S314


# CSV


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("\ttab", "'\ttab"),
        ("\r=1", "'\n'=1"),
        ("\n=1", "'\n'=1"),
        ("  =1", "'  =1"),
        ("\u00a0=1", "'\u00a0=1"),
        ("\u200b=1", "'=1"),
        ("\x00=1", "'=1"),
        ('"=1', "'\"=1"),
        ("\uff1d1", "'\uff1d1"),
        ("fine\n-second", "fine\n'-second"),
        ("\x1b[31mred", "red"),
        ("a-b=c", "a-b=c"),
        ("", ""),
        (-1, "-1"),
        (-0.5, "-0.5"),
        (1e-07, "1e-07"),
        (float("nan"), "nan"),
        (True, "true"),
        (None, ""),
    ],
)
def test_a_cell_is_never_a_formula_and_a_number_stays_one(text, cell):
    assert cell_text(text) == cell


def test_raw_keeps_formulas_and_only_them():
    assert cell_text("=1\x1b[31m", raw=True) == "=1"


@pytest.mark.parametrize("text", SAFE)
def test_csv_reads_back_as_one_cell_that_starts_no_formula(text):
    (header, row) = csv.reader(io.StringIO(csv_text(["a", "b"], [[text, 1.5]])))
    assert header == ["a", "b"]
    assert row[1] == "1.5"
    assert all(not line.lstrip(" \u00a0\"'").startswith(("=", "+", "-", "@", "\t")) or line.lstrip()[0] == "'"
               for line in row[0].split("\n"))  # fmt: skip


# query and export


@pytest.fixture
def duckdb():
    return pytest.importorskip("duckdb", reason="the extra `query` is not installed")


def test_query_answers_as_table_csv_and_json(cli, campaign, duckdb):
    sql = "SELECT run, hypothesis, gain FROM runs WHERE run >= 'run-002' ORDER BY run LIMIT 2"
    assert [re.split("  +", line) for line in cli("query", sql).out.splitlines()] == [
        ["run", "hypothesis", "gain"],
        ["run-002", "Alpha 64 learns faster", "0.4"],
        ["run-003", '=HYPERLINK("x") <b>@all</b>', "-"],
    ]
    assert cli("query", sql, "--format", "csv").out.splitlines() == [
        "run,hypothesis,gain",
        "run-002,Alpha 64 learns faster,0.39999999999999997",
        'run-003,"\'=HYPERLINK(""x"") <b>@all</b>",',
    ]
    document = cli("query", sql, "--json").document
    assert document["rows"][1]["hypothesis"].endswith("\x1b[31m<b>@all</b>")
    assert document["columns"] == {"run": "VARCHAR", "hypothesis": "VARCHAR", "gain": "DOUBLE"}
    capped = cli("query", "FROM range(500)", "--json").document
    assert (len(capped["rows"]), capped["truncated"], capped["counts"]) == (100, True, {"shown": 100})
    assert "first 3 rows" in cli("query", "FROM range(500)", "--limit", "3").out
    assert cli("query", "SELECT run FROM runs WHERE false").out.splitlines()[-1] == "no rows"


def test_query_reads_config_events_evals_and_metrics(cli, campaign, duckdb):
    def rows(sql):
        return [tuple(row.values()) for row in cli("query", sql, "--json").document["rows"]]

    folder = campaign.analysis_dir("run-002") / "data"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.25\n")
    assert rows("SELECT config->>'$.lora.alpha' FROM runs WHERE run = 'run-002'") == [("64.0",)]
    assert rows("SELECT data->>'$.reason' FROM events WHERE kind = 'decided' ORDER BY recorded_at") == [
        ("the gain holds",),
        ("-1 point",),
    ]
    assert rows("SELECT count(*) FROM evals WHERE last AND metric = 'accuracy'") == [(1,)]
    assert rows("SELECT min(value) FROM metrics WHERE run = 'run-002'") == [(0.25,)]


@pytest.mark.parametrize(
    ("argv", "kind", "code"),
    [
        (["DROP TABLE runs"], "usage", 2),
        (["SELECT * FROM read_text('GOAL.md')"], "usage", 2),
        (["SELECT 1", "--format", "cvs"], "usage", 2),
        (["SELECT count(*) FROM range(1000000) a, range(1000000)", "--timeout", "0.2"], "stopped", 4),
    ],
)
def test_query_refuses_in_one_envelope(cli, campaign, duckdb, argv, kind, code):
    answer = cli("query", *argv, "--json")
    assert (answer.code, answer.document["error"]["kind"]) == (code, kind)


def test_query_reads_a_statement_from_standard_input(cli, campaign, duckdb, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("SELECT count(*) AS n FROM runs\n"))
    assert cli("query", "-", "--json").document["rows"] == [{"n": 4}]


def test_values_of_other_types_are_plain(duckdb):
    sql = "SELECT 1.5::DECIMAL(4,2), DATE '2026-01-02', [1, NULL], {'a': 'x'}, 'ab'::BLOB, 170141183460469231731687303"
    row = duckdb.connect().execute(sql + ", '0.1234567890123456789'::DECIMAL(20,19), INTERVAL 1 DAY").fetchone()
    assert [plain(value) for value in row] == [
        1.5,
        "2026-01-02",
        [1, None],
        {"a": "x"},
        "6162",
        170141183460469231731687303,
        "0.1234567890123456789",
        "1 day, 0:00:00",
    ]


def test_export_writes_the_same_rows_in_every_format(cli, campaign, tmp_path, duckdb):
    for form in ("csv", "json", "parquet"):
        document = cli("export", "--format", form, "--out", tmp_path / f"runs.{form}", "--json").document
        assert (document["applied"], document["detail"]["rows"]) == (True, 4)
    rows = json.loads((tmp_path / "runs.json").read_text())
    assert rows == cli("export", "--json").document["rows"]
    stored = duckdb.connect().read_parquet(str(tmp_path / "runs.parquet"))
    assert [dict(zip(stored.columns, row, strict=True)) for row in stored.fetchall()] == rows
    table = list(csv.DictReader((tmp_path / "runs.csv").open(newline="")))
    assert [row["run"] for row in table] == [row["run"] for row in rows]
    assert float(table[1]["gain"]) == rows[1]["gain"]
    assert table[2]["hypothesis"] == '\'=HYPERLINK("x") <b>@all</b>'
    assert rows[2]["hypothesis"] == '=HYPERLINK("x") \x1b[31m<b>@all</b>'
    assert table[2]["reason"] == "'-1 point"
    again = cli("export", "--out", tmp_path / "runs.csv", "--json")
    assert (again.code, again.document["error"]["hint"]) == (2, "--force replaces it")
    assert cli("export").out == (tmp_path / "runs.csv").read_text()


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--format", "parquet"], "--out"),
        (["--format", "cvs"], "'csv'"),
        (["--table", "run"], "'runs'"),
    ],
)
def test_export_refuses_with_what_helps(cli, campaign, argv, hint):
    answer = cli("export", *argv, "--json")
    assert answer.code == 2
    assert hint in answer.document["error"]["hint"]


@pytest.mark.parametrize("argv", [["query", "SELECT 1"], ["export", "--format", "parquet", "--out", "x.parquet"]])
def test_without_duckdb_the_install_line_is_given(cli, campaign, monkeypatch, argv):
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    answer = cli(*argv, "--json")
    assert (answer.code, answer.document["error"]["kind"]) == (2, "missing_extra")
    assert answer.document["error"]["hint"] == "pip install 'post-training-harness[query]'"
    assert cli("export", "--table", "events").code == 0


COMMANDS = [
    ["list", "--columns", "run,hypothesis,reason,decision,parent,lever,tags"],
    ["list", "--where", "hypothesis~x", "--json"],
    ["show", "run-002"],
    ["diff", "run-001", "run-002"],
    ["log"],
    ["log", "--jsonl"],
    ["lineage"],
    ["export"],
    ["export", "--raw"],
    ["export", "--format", "json", "--table", "events"],
]


def test_hostile_text_reaches_no_terminal(cli, program):
    ledger = Ledger(program.ledger)
    text = " ".join(SAFE)
    data = {
        "type": text,
        "hypothesis": text,
        "parent": text,
        "lever": text,
        "config": text,
        "settings": {text[:60]: text},
    }
    ledger.append("run-002", "imported", data | {"final": {f"{text[:20]}/reward/": 1.0}})
    ledger.append("run-002", "evaluated", evaluation(0.5, 0.4, env=text[:80], prompt=text))
    ledger.append("run-002", "decided", {"decision": text[:20], "reason": text})
    ledger.append("run-002", "tagged", {"tag": text[:40]})
    for argv in COMMANDS:
        answer = cli(*argv)
        assert answer.code == 0, (argv, answer.err)
        bad = {c for c in answer.out + answer.err if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160}
        assert not bad | {c for c in "\u202e\u2066\u200b\ufeff" if c in answer.out}, argv
