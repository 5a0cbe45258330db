"""Each reader gives the run its source holds, from bytes that the libraries wrote and from bytes made here."""

import json
import math

import pytest

from harness.core.errors import MissingExtraError, NotFoundError, UsageError
from harness.imports import mlflow, tensorboard, trl, verifiers, wandb_csv, wandb_offline, wire
from harness.imports.formats import FORMATS, choose
from harness.imports.source import Source, SourceError
from tests.imports import builders, golden


def source(path):
    return Source(path)


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_crc32c_gives_the_published_values(data, crc):
    assert wire.crc32c(data) == crc  # RFC 3720, B.4


def test_protobuf_fields_are_read_and_broken_ones_refused():
    data = builders.field(1, -5) + builders.field(2, 0.5) + builders.field(3, "text") + builders.field(2047, b"")
    found = {item[0]: item for item in wire.fields(data)}
    assert wire.integer(found[1]) == -5
    assert wire.real(found[2]) == 0.5
    assert wire.text(found[3]) == "text"
    assert found[2047][2] == b""
    for broken in (data[:5], b"\xff" * 11, b"\x0b", b"\x0a\x7fshort", b"\x09\x00"):
        with pytest.raises(SourceError):
            list(wire.fields(broken))


def test_tensorboard_reads_what_its_own_writer_wrote(tmp_path):
    (tmp_path / "try").mkdir()
    (tmp_path / "try" / "events.out.tfevents.1.host").write_bytes(golden.TENSORBOARD)
    (run,) = tensorboard.read(source(tmp_path))
    assert run.name == "try"
    assert run.metrics == {"train/reward": {1: 0.25, 2: 0.5, 3: 0.75}}  # a plain float, a float and a double tensor
    assert run.config == {"lr": 0.001, "opt": "adam"}
    assert run.started_at == "2023-11-14T22:13:20.250Z"
    assert run.not_read == ("1 image(s)",)


def test_tensorboard_takes_one_run_per_folder_and_joins_its_files(tmp_path):
    for folder, name, points in (("a", "1", [(1, "loss", 2.0)]), ("a", "2", [(2, "loss", 1.0)]), ("b", "1", [])):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"events.out.tfevents.{name}").write_bytes(builders.event_file(points))
    runs = {run.name: run.metrics for run in tensorboard.read(source(tmp_path))}
    assert runs == {"a": {"loss": {1: 2.0, 2: 1.0}}, "b": {}}


def test_a_cut_event_file_keeps_its_whole_records(tmp_path):
    data = builders.event_file([(step, "loss", float(step)) for step in range(5)])
    last = len(builders.tf_record(builders.event(4, "loss", 4.0)))
    for cut in (1, 4, 13, last - 1):
        (tmp_path / "events.out.tfevents.1").write_bytes(data[:-cut])
        (run,) = tensorboard.read(source(tmp_path))
        assert run.metrics["loss"] == {step: float(step) for step in range(4)}


def test_every_changed_byte_of_an_event_file_is_noticed(tmp_path):
    data = builders.event_file([(1, "loss", 0.5), (2, "loss", 0.25)])
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x41
        (tmp_path / "events.out.tfevents.1").write_bytes(changed)
        with pytest.raises(SourceError, match="damaged at byte"):
            tensorboard.read(source(tmp_path))


def test_wandb_reads_what_its_own_writer_wrote(tmp_path):
    (tmp_path / "run-abc123.wandb").write_bytes(golden.WANDB)
    (run,) = wandb_offline.read(source(tmp_path))
    assert (run.name, run.source_id, run.outcome) == ("golden - run", "abc123", "completed")
    assert run.config == {"learning_rate": 1e-6, "lora": {"alpha": 64}}
    assert run.metrics["reward/mean"] == {0: 0.0, 1: 0.25, 2: 0.5}
    assert run.metrics["optim.lr"] == {0: 0.0, 1: 0.5, 2: 1.0}  # typed doubles under a nested key
    assert run.metrics["tokens"] == {0: -3.0, 1: -2.0, 2: -1.0}  # typed sint64
    assert math.isnan(run.metrics["loss"][3])
    assert run.started_at == "2023-11-14T22:13:20.000Z"


@pytest.mark.parametrize(("end", "outcome"), [([0], "completed"), ([3], "failed"), ([], "interrupted")])
def test_a_wandb_log_tells_how_its_run_ended(tmp_path, end, outcome):
    records = [builders.wandb_run("r", {}), *(builders.wandb_history(i, x=i) for i in range(3))]
    records += [builders.wandb_exit(code) for code in end]
    folder = tmp_path / "offline-run-1"
    folder.mkdir()
    (folder / "run-1.wandb").write_bytes(builders.wandb_log(records))
    (run,) = wandb_offline.read(source(tmp_path))
    assert (run.outcome, run.metrics) == (outcome, {"x": {0: 0.0, 1: 1.0, 2: 2.0}})


def test_a_wandb_record_may_span_blocks_and_a_cut_one_is_left_out(tmp_path):
    records = [builders.wandb_run("long", {"text": "y" * 100_000}), builders.wandb_history(0, x=1)]
    data = builders.wandb_log([*records, builders.wandb_history(1, x=2)])
    (tmp_path / "run-1.wandb").write_bytes(data)
    (run,) = wandb_offline.read(source(tmp_path))
    assert len(run.config["text"]) == 100_000
    assert run.metrics["x"] == {0: 1.0, 1: 2.0}
    (tmp_path / "run-1.wandb").write_bytes(data[:-3])
    assert wandb_offline.read(source(tmp_path))[0].metrics["x"] == {0: 1.0}
    changed = bytearray(data)
    changed[60_000] ^= 1
    (tmp_path / "run-1.wandb").write_bytes(changed)
    with pytest.raises(SourceError, match="damaged at byte"):
        wandb_offline.read(source(tmp_path))


def test_wandb_without_its_log_falls_back_to_the_files_and_says_so(tmp_path):
    pytest.importorskip("yaml")
    files = tmp_path / "offline-run-7" / "files"
    files.mkdir(parents=True)
    (files / "wandb-summary.json").write_text('{"_step": 9, "loss": 0.5, "text": "no", "nan": NaN, "_runtime": 3}')
    (files / "config.yaml").write_text("wandb_version: 1\n_wandb: {value: {a: 1}}\nlr: {desc: null, value: 0.001}\n")
    (run,) = wandb_offline.read(source(tmp_path))
    assert run.metrics["loss"] == {9: 0.5}
    assert run.config == {"lr": 0.001}
    assert "only the summary" in run.not_read[0]


def test_wandb_exports_give_every_run_its_config_and_its_ending(tmp_path):
    base, faster = wandb_csv.read(source(builders.write_exports(tmp_path / "x")))
    assert (base.name, base.outcome, base.last_step) == ("base", "completed", 3)
    assert (faster.name, faster.outcome) == ("faster - lr", "stopped")  # the separator stands in its name
    assert faster.reason == "its last value is of step 2, its config has 3 steps"
    assert faster.config["learning_rate"] == 1e-5
    assert set(base.metrics) == {"reward/mean", "metrics/accuracy_reward", "eval/acme/Toy_Env/avg@2"}
    assert base.env == "toy_env"
    first, last = base.evals
    assert (first.subject, first.step, first.source_step, first.requested) == ("base", 0, 1, 20)
    assert (last.subject, last.step, last.means, last.samples) == ("policy", 3, {"reward": 0.5}, 2)


def test_a_group_in_an_export_keeps_its_bounds(tmp_path):
    text = '"Step","g - loss","g - loss__MIN","g - loss__MAX"\n1,0.5,0.4,0.6\n2,oops,0.3,0.3\n'
    (tmp_path / "a.csv").write_text(text)
    (run,) = wandb_csv.read(source(tmp_path))
    assert run.metrics == {"loss": {1: 0.5}, "loss__MIN": {1: 0.4, 2: 0.3}, "loss__MAX": {1: 0.6, 2: 0.3}}
    assert run.not_read == ("1 cell(s) that are no number",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('"Relative Time","r - m"\n1,2\n', "not Step"),
        ('"Step","nothing"\n1,2\n', "no `run - metric`"),
        ('"Step","r - m"\n1\n', "line 2 has 1 cells"),
        ('"Step","r - m"\nx,2\n', "has no step"),
        ('"Step","r - m"\n1e300,2\n', "has no step"),
        ('"Step","r - m"\n1,"2\n', "damaged"),
        ('"Step","r - m"\n1,"' + "9" * 200_000 + '"\n', "damaged"),
    ],
)
def test_a_broken_export_is_refused_with_its_place(tmp_path, text, told):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(SourceError, match=told):
        wandb_csv.read(source(tmp_path))


@pytest.mark.parametrize(("status", "outcome"), [(1, "interrupted"), (3, "completed"), (4, "failed"), (5, "stopped")])
def test_mlflow_reads_a_run_of_a_file_store(tmp_path, status, outcome):
    pytest.importorskip("yaml")
    builders.write_mlflow(tmp_path / "mlruns", status=status)
    (run,) = mlflow.read(source(tmp_path / "mlruns"))
    assert (run.name, run.source_id, run.outcome) == ("toy run", "a" * 32, outcome)
    assert run.metrics == {"train/reward": {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75}}
    assert run.config == {"lr": 1e-05, "name": "adam"}
    assert run.tags == {"team": "a"}  # nothing of who and where
    assert run.started_at == "2023-11-14T22:13:20.000Z"


def test_mlflow_leaves_deleted_runs_out_and_takes_a_run_folder_alone(tmp_path):
    pytest.importorskip("yaml")
    builders.write_mlflow(tmp_path / "mlruns", run="b" * 32, lifecycle_stage="deleted")
    folder = builders.write_mlflow(tmp_path / "mlruns")
    found = source(tmp_path / "mlruns")
    assert [run.source_id for run in mlflow.read(found)] == ["a" * 32]
    assert found.notes == [f"run {'b' * 32}, which is deleted"]
    assert mlflow.read(source(folder))[0].source_id == "a" * 32


def test_mlflow_says_which_line_is_broken(tmp_path):
    pytest.importorskip("yaml")
    folder = builders.write_mlflow(tmp_path / "mlruns")
    (folder / "metrics" / "train" / "reward").write_text("1700 0.5 1\n1701 half 2\n")
    with pytest.raises(SourceError, match="reward line 2"):
        mlflow.read(source(tmp_path / "mlruns"))


def test_trl_takes_the_latest_state_and_never_opens_a_pickle(tmp_path):
    for step in (1, 3):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps(builders.trainer_state(step)))
        (folder / "training_args.bin").write_bytes(b"\x80\x04cos\nsystem\n")
        (folder / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 64}')
    (run,) = trl.read(source(tmp_path / "out"))
    assert run.metrics["reward"] == {1: 0.25, 2: 0.5, 3: 0.75}
    assert math.isnan(run.metrics["train_loss"][3])
    assert run.config["adapter_config"] == {"r": 16, "lora_alpha": 64}
    assert run.outcome == "completed"
    assert run.not_read == ("2 pickled file(s), which could run code",)


def test_trl_tells_a_training_that_did_not_reach_its_end(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps(builders.trainer_state(3, planned=9)))
    (run,) = trl.read(source(tmp_path))
    assert (run.outcome, run.reason) == ("stopped", "its last state is of step 3 of 9")


def test_trl_completions_become_rollouts_of_the_first_and_the_last_step(tmp_path):
    duckdb = pytest.importorskip("duckdb")
    (tmp_path / "trainer_state.json").write_text(json.dumps(builders.trainer_state()))
    folder = tmp_path / "completions"
    folder.mkdir()
    for step in (1, 2, 3):
        columns = (
            f"'q' AS prompt, 'a{step}' AS completion, {step}::DOUBLE AS accuracy, 0.5 AS format, 0.25 AS advantage"
        )
        target = folder / f"completions_{step:05d}.parquet"
        duckdb.sql(f"COPY (SELECT {step} AS step, {columns}) TO '{target}' (FORMAT parquet)")
    (run,) = trl.read(source(tmp_path))
    assert sorted(run.rollouts) == [1, 3]
    (row,) = run.rollouts[3]
    assert (row["completion"], row["reward"], row["advantage"]) == ("a3", 3.5, 0.25)
    assert row["components"] == {"accuracy": 3.0, "format": 0.5}


def test_a_parquet_file_that_is_none_is_refused(tmp_path):
    pytest.importorskip("duckdb")
    folder = tmp_path / "completions"
    folder.mkdir()
    (folder / "completions_00001.parquet").write_bytes(b"PAR1" + bytes(64) + b"PAR1")
    with pytest.raises(SourceError, match="no readable parquet"):
        trl.read(source(tmp_path))


def test_verifiers_results_become_one_eval_with_items(tmp_path):
    rows = [builders.result_row(0, 1.0), builders.result_row(0, 0.0), builders.result_row(1, 1.0)]
    rows.append(builders.result_row(1, 0.0, error={"error": "APITimeout", "error_chain_str": "timed out"}))
    rows.append(builders.result_row(2, None, is_truncated=True))
    (run,) = verifiers.read(source(builders.write_results(tmp_path / "toy-env--m", rows)))
    (result,) = run.evals
    assert [item.failure for item in result.items] == [None, "model", None, "infra", "verifier"]
    assert [item.key for item in result.items] == [("0", 0), ("0", 1), ("1", 0), ("1", 1), ("2", 0)]
    assert (result.env, result.requested, run.outcome) == ("toy-env", 6, "stopped")
    assert run.reason == "5 of 6 results are in the file"
    assert "base_url" not in run.config
    assert run.rollouts[0][3]["diagnostics"] == {"error": "timed out"}


def test_older_verifiers_results_have_their_metrics_beside_the_reward(tmp_path):
    row = {"id": 7, "prompt": "p", "completion": "c", "reward": 1.0, "parse_func": 1.0, "task": "t", "flag": True}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n\n")
    (run,) = verifiers.read(source(tmp_path))
    (item,) = run.evals[0].items
    assert (item.task, dict(item.components)) == ("7", {"parse_func": 1.0})


def test_a_broken_result_is_named_by_its_line(tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps(builders.result_row(0, 1.0)) + '\n{"prompt": 1}\n')
    with pytest.raises(SourceError, match=r"results\.jsonl line 2 is no result"):
        verifiers.read(source(tmp_path))


def test_traces_of_verifiers_v1_become_one_eval_with_items(tmp_path):
    error = {"type": "ProviderError", "message": "502", "status_code": 502}
    broken = builders.trace(errors=[error], ok=False, rewards={})
    scoring = builders.trace(errors=[{"type": "TaskError", "message": "boom"}], ok=False, rewards={"exact": None})
    tool = builders.trace(errors=[{"type": "ToolsetError", "message": "gone"}], ok=False, rewards={})
    cut = builders.trace(0.0, stop_condition="max_turns")
    rows = [
        builders.episode("a", builders.trace(1.0)),
        builders.episode("a", builders.trace(0.0, errors=[error])),  # the second attempt went well
        builders.episode("b", cut),
        builders.episode("b", broken, ok=False),
        builders.episode("c", scoring, ok=False),
        builders.episode("c", tool, ok=False),
        builders.episode("d", ok=False, errors=[error]),  # broke before its first trace
    ]
    (run,) = verifiers.read(source(builders.write_traces(tmp_path / "toy--m--null--ab", rows, num_tasks=4)))
    (result,) = run.evals
    items = result.items
    assert [item.key for item in items] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1), ("d", 0)]
    assert [item.failure for item in items] == [None, "model", "model", "infra", "verifier", "tool", "infra"]
    assert [round(item.reward, 6) for item in items[:3]] == [1.0, 0.2, 0.2]  # 0.8 exact + 0.2 format
    assert dict(items[1].components) == {"exact": 0.0, "format": 1.0, "turns": 1.0}
    assert [item.finish for item in items[:3]] == [None, None, "length"]
    assert (result.env, result.requested, result.samples) == ("toy-env", 8, 2)
    assert (run.outcome, run.reason) == ("stopped", "7 of 8 results are in the file")
    assert "client" not in run.config and run.config["sampling"] == {"temperature": 0.7}
    first = run.rollouts[0][0]
    assert first["prompt"] == "[system]\nAnswer.\n[user]\nWhich?"
    assert first["completion"] == "[assistant]\n\x1b[31mB\x1b[0m"  # the last branch, as it was written
    assert (first["tokens"], first["finish"]) == (7, "done")
    assert run.rollouts[0][3]["diagnostics"] == {"error": "ProviderError: 502"}


def test_bare_traces_a_toml_config_and_a_torn_end_are_read(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    line = json.dumps(builders.trace(1.0))
    (folder / "traces.jsonl").write_text(line + "\n" + line[:40])
    (folder / "config.toml").write_text('model = "m"\n[taskset]\nid = "toy"\n')
    (run,) = verifiers.read(source(folder))
    assert (run.name, run.evals[0].items[0].task, len(run.evals[0].items)) == ("toy m", "toy-0", 1)
    assert run.not_read == ("line 2 of traces.jsonl, which is torn",)
    (folder / "traces.jsonl").write_text(line[:40] + "\n" + line + "\n")
    with pytest.raises(SourceError, match=r"traces\.jsonl line 1 is damaged"):
        verifiers.read(source(folder))
    (folder / "traces.jsonl").write_text('{"reward": 1}\n')
    with pytest.raises(SourceError, match="is no episode"):
        verifiers.read(source(folder))


def test_agents_that_are_not_trained_are_left_out_and_others_kept_apart(tmp_path):
    judge = builders.trace(0.0, agent="judge")
    judge["agent"]["trainable"] = False
    two = builders.episode("a", builders.trace(agent="solver"), builders.trace(0.0, agent="critic"), judge)
    (run,) = verifiers.read(source(builders.write_traces(tmp_path / "x", [two])))
    assert [(item.task, item.cluster) for item in run.evals[0].items] == [("a [solver]", "a"), ("a [critic]", "a")]


def test_a_circle_in_a_message_graph_ends(tmp_path):
    looped = builders.trace()
    looped["nodes"][0]["parent"] = 3
    looped["nodes"][1]["parent"] = 1
    (run,) = verifiers.read(source(builders.write_traces(tmp_path / "x", [builders.episode("a", looped)])))
    assert run.rollouts[0][0]["prompt"] == "[user]\nWhich?"


def test_the_format_is_found_and_an_unclear_one_is_asked_for(tmp_path):
    builders.write_exports(tmp_path / "csv")
    builders.write_mlflow(tmp_path / "mlruns")
    builders.write_results(tmp_path / "evals", [builders.result_row(0, 1.0)])
    builders.write_traces(tmp_path / "traces", [builders.episode("a", builders.trace())])
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1").write_bytes(builders.event_file([]))
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "trainer_state.json").write_text("{}")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run-1.wandb").write_bytes(golden.WANDB)
    wanted = {
        "csv": "wandb-csv",
        "mlruns": "mlflow",
        "evals": "verifiers",
        "traces": "verifiers",
        "tb": "tensorboard",
        "trl": "trl",
        "wandb": "wandb-offline",
    }
    assert {name: choose(source(tmp_path / name)) for name in wanted} == wanted
    assert set(wanted.values()) == set(FORMATS)
    with pytest.raises(SourceError, match="several formats"):
        choose(source(tmp_path))
    assert choose(source(tmp_path), "trl") == "trl"
    with pytest.raises(UsageError, match="no format"):
        choose(source(tmp_path), "trll")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SourceError, match="no format that can be imported"):
        choose(source(tmp_path / "nothing"))
    with pytest.raises(NotFoundError):
        source(tmp_path / "absent")


def test_a_missing_package_gives_its_install_line(tmp_path, monkeypatch):
    builders.write_mlflow(tmp_path / "mlruns")
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingExtraError) as caught:
        mlflow.read(source(tmp_path / "mlruns"))
    assert "post-training-harness[imports]" in caught.value.hint
