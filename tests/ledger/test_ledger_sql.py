"""SQL over the ledger reaches the ledger's tables and nothing else."""

import sys

import pytest

from harness.core.errors import MissingExtraError, StoppedError, UsageError
from harness.ledger import sql
from harness.ledger.tables import TABLES, table

EVENTS = table("events", [{"id": "a", "run": "run-001", "kind": "noted", "data": {"text": "it's \x1b[31m=1+1"}}])


@pytest.fixture(scope="module", autouse=True)
def duckdb():
    return pytest.importorskip("duckdb", reason="the extra `query` is not installed")


def ask(text, tables=(EVENTS,), limit=10, timeout_s=30.0):
    return sql.query(tables, text, limit=limit, timeout_s=timeout_s)


def test_rows_columns_and_the_limit():
    answer = ask("SELECT run, data->>'$.text' AS text FROM events")
    assert answer == ({"run": "VARCHAR", "text": "VARCHAR"}, [("run-001", "it's \x1b[31m=1+1")], False)
    counted = ask("SELECT i FROM range(5000000000) t(i)", limit=3)
    assert ([row[0] for row in counted.rows], counted.more) == ([0, 1, 2], True)
    assert ask("SELECT i FROM range(50) t(i) ORDER BY i DESC", limit=2).rows == [(49,), (48,)]
    assert len(ask("FROM range(500)", limit=None).rows) == 500
    assert list(ask("SELECT 1 AS a, 2 AS a").columns) == ["a", "a_2"]


def test_every_table_exists_even_when_it_is_empty():
    assert sorted(row[0] for row in ask("SHOW TABLES", tables=()).rows) == sorted(TABLES)
    for name in TABLES:
        assert ask(f"SELECT * FROM {name}", tables=()).rows == []  # noqa: S608


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.csv"
    path.write_text("canary\ncanary\n")
    return path


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM read_text('{}')",
        "SELECT * FROM read_csv('{}')",
        "SELECT * FROM '{}'",
        "SELECT * FROM read_blob('{}')",
        "SELECT * FROM sniff_csv('{}')",
        "SELECT * FROM read_json_objects('{}')",
        "SELECT * FROM parquet_metadata('{}')",
        "SELECT * FROM glob('{}')",
        "COPY events TO '{}.out'",
        "COPY (SELECT 1) TO '{}.out' (FORMAT parquet)",
        "EXPORT DATABASE '{}.out'",
        "ATTACH '{}.out'",
        "ATTACH '{}.out'; SELECT 1",
        "CREATE TABLE t AS SELECT 1",
        "INSERT INTO events (id) VALUES ('x')",
        "UPDATE events SET run = 'x'",
        "DELETE FROM events",
        "DROP TABLE events",
        "INSTALL httpfs",
        "LOAD httpfs",
        "LOAD '{}'",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "RESET enable_external_access",
        "PRAGMA enable_profiling",
        "CALL pragma_version()",
        "SELECT * FROM read_csv('https://evil.example/x.csv')",
        "SELECT getenv('HOME')",
        "SELECT * FROM secret",
        "SELECT * FROM EVENTS_OF_THIS_TEST",
        "EXPLAIN ANALYZE DELETE FROM events",
        "PREPARE x AS SELECT 1",
        "BEGIN; SELECT 1",
        "SELECT 1; SELECT 2",
        "",
        "-- nothing",
        "selec 1",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    ],
)
def test_nothing_outside_is_read_written_or_switched_on(statement, secret, tmp_path):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        ask(statement.replace("{}", str(secret)))
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert sorted(tmp_path.iterdir()) == before
    assert secret.read_text() == "canary\ncanary\n"


EVENTS_OF_THIS_TEST = [{"canary": 1}]


def test_settings_stay_locked_inside_a_select():
    names = "'enable_external_access', 'lock_configuration', 'python_enable_replacements'"
    rows = ask(f"SELECT name, value FROM duckdb_settings() WHERE name IN ({names})").rows  # noqa: S608
    assert {name: value.lower() for name, value in rows} == {
        "enable_external_access": "false",
        "lock_configuration": "true",
        "python_enable_replacements": "false",
    }


def test_a_query_that_takes_too_long_or_too_much_is_stopped(monkeypatch):
    with pytest.raises(StoppedError, match=r"longer than 0\.3 s"):
        ask("SELECT count(*) FROM range(1000000) a, range(1000000) b", timeout_s=0.3)
    monkeypatch.setattr(sql, "_LOCKED", ("memory_limit = '40MB'", *(s for s in sql._LOCKED if "memory" not in s)))
    with pytest.raises(StoppedError, match="of memory"):
        ask("SELECT list(i || repeat('x', 100)) FROM range(600000) t(i)")


def test_a_statement_has_a_largest_size():
    with pytest.raises(UsageError, match="characters"):
        ask("SELECT 1 --" + "x" * sql.MAX_SQL)


def test_only_tables_that_are_named_are_filled():
    assert sql.tables_of("select * from RUNS join evals using (run)") == ["runs", "evals"]
    assert sql.tables_of("from query_table('me' || 'trics')") == list(TABLES)


def test_without_duckdb_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingExtraError) as caught:
        ask("SELECT 1")
    assert caught.value.hint == "pip install 'post-training-harness[query]'"


def test_parquet_holds_the_exact_cells(tmp_path, duckdb):
    path = tmp_path / "it's; DROP TABLE x.parquet"
    sql.write_parquet(EVENTS, path)
    rows = duckdb.connect().read_parquet(str(path)).fetchall()
    assert [tuple(row) for row in rows] == EVENTS.rows
    first = path.read_bytes()
    path.unlink()
    sql.write_parquet(EVENTS, path)
    assert path.read_bytes() == first
