"""Sources of other tools, put together by hand: wire formats byte by byte, folders file by file."""

import json
import struct
import zlib

from harness.imports.wire import masked_crc32c


def varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while True:
        out.append((value & 0x7F) | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def field(number, value):
    """Encode one protobuf field: int as varint, float as double, bytes and text with their length."""
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tf_record(payload):
    head = struct.pack("<Q", len(payload))
    return head + struct.pack("<I", masked_crc32c(head)) + payload + struct.pack("<I", masked_crc32c(payload))


def event(step, tag, value):
    scalar = field(1, tag) + varint(2 << 3 | 5) + struct.pack("<f", value)
    return field(1, 1700000000.0 + step) + field(2, step) + field(5, field(1, scalar))


def event_file(points):
    """Return an event file of (step, tag, value)."""
    return tf_record(field(1, 1700000000.0) + field(3, "brain.Event:2")) + b"".join(
        tf_record(event(*point)) for point in points
    )


def wandb_log(records):
    """Return a `.wandb` file; records that do not fit a block are split."""
    out = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        rest, first = record, True
        while True:
            room = 32768 - len(out) % 32768
            if room < 7:
                out += b"\0" * room
                continue
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if not rest else 2) if first else (4 if not rest else 3)
            out += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            first = False
            if not rest:
                break
    return bytes(out)


def wandb_history(step, **values):
    items = b"".join(field(1, field(1, key) + field(16, json.dumps(value))) for key, value in values.items())
    return field(2, items + field(2, field(1, step)))


def wandb_run(name, config):
    updates = b"".join(field(1, field(1, key) + field(16, json.dumps(value))) for key, value in config.items())
    return field(17, field(1, "id0") + field(4, updates) + field(8, name))


def wandb_exit(code):
    return field(18, field(1, code))


def write_csv(folder, metric, runs, steps, header="Step"):
    """Write one W&B chart export; `runs` maps names to a value per step, None for an empty cell."""
    titles = [header]
    for run in runs:
        titles += [f"{run} - {metric}", f"{run} - {metric}__MIN", f"{run} - {metric}__MAX"]
    lines = [",".join(f'"{title}"' for title in titles)]
    for index, step in enumerate(steps):
        cells = [str(step)]
        for values in runs.values():
            cells += ["" if values[index] is None else repr(values[index])] * 3
        lines.append(",".join(cells))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"metrics_{metric.replace('/', '_')}.csv").write_text("\n".join(lines) + "\n")


def write_exports(folder):
    """Write two exported runs with their configs: a base line and a higher rate that was stopped."""
    runs = {"base": [0.1, 0.2, 0.3], "faster - lr": [0.1, 0.4, None]}
    write_csv(folder, "reward/mean", runs, [1, 2, 3])
    write_csv(folder, "metrics/accuracy_reward", runs, [1, 2, 3])
    write_csv(folder, "eval/acme/Toy_Env/avg@2", {"base": [0.2, 0.5], "faster - lr": [0.25, None]}, [1, 3])
    (folder / "configs").mkdir()
    for name, rate in (("base", "1e-6"), ("faster - lr", "1e-5")):
        text = f'name = "x-{name}"\nmax_steps = 3\nlearning_rate = {rate}\nlora_alpha = 16\napi_key = "abc123secret"\n'
        text += '[[env]]\nid = "acme/Toy_Env@0.1"\n[eval]\ninterval = 2\nnum_examples = 10\nrollouts_per_example = 2\n'
        text += f'[wandb]\nname = "{name}"\n'
        (folder / "configs" / f"{name.replace(' ', '_')}.toml").write_text(text)
    return folder


def write_mlflow(root, run="a" * 32, status=3, **meta):
    """Write one run of an MLflow file store."""
    folder = root / "1" / run
    for place in ("params", "metrics/train", "tags"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    lines = {"run_id": run, "run_name": "toy run", "status": status, "start_time": 1700000000000}
    lines |= {"lifecycle_stage": "active", "artifact_uri": "file:///etc"} | meta
    (folder / "meta.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in lines.items()))
    (folder / "params" / "lr").write_text("1e-05")
    (folder / "params" / "name").write_text("adam")
    (folder / "metrics" / "train" / "reward").write_text("".join(f"170{i} {i / 4} {i}\n" for i in range(4)))
    (folder / "tags" / "team").write_text("a")
    (folder / "tags" / "mlflow.user").write_text("somebody")
    return folder


def trainer_state(step=3, planned=3):
    rows = [
        {"step": i, "reward": i / 4, "rewards/accuracy/mean": i / 8, "completions/mean_length": 40.0, "grad_norm": 0.5}
        for i in range(1, step + 1)
    ]
    rows.append({"step": step, "train_runtime": 1.0, "train_loss": float("nan")})
    return {"global_step": step, "max_steps": planned, "log_history": rows}


def result_row(example, reward, **more):
    row = {
        "example_id": example,
        "prompt": [{"role": "user", "content": "Which?"}],
        "completion": [{"role": "assistant", "content": "\x1b[31mB\x1b[0m"}],
        "answer": "B",
        "reward": reward,
        "metrics": {"format": 1.0},
        "is_truncated": False,
        "error": None,
        "token_usage": {"input_tokens": 9.0, "output_tokens": 4.0},
    }
    return row | more


def write_results(folder, rows, **metadata):
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {
        "env_id": "acme/toy-env",
        "model": "m",
        "num_examples": 3,
        "rollouts_per_example": 2,
        "base_url": "http://x",
    }
    (folder / "metadata.json").write_text(json.dumps(known | metadata))
    return folder


def trace(reward=1.0, agent="agent", **more):
    """One trace of verifiers v1 as its writer dumps it: nulls dropped, a tool turn, a branch that was given up."""

    def node(role, content, parent=None, sampled=False):
        found = {"message": {"role": role, "content": content}, "sampled": sampled, "token_ids": [1], "mask": [sampled]}
        return found if parent is None else found | {"parent": parent}

    nodes = [
        node("system", "Answer."),
        node("user", [{"type": "text", "text": "Which?"}], 0),
        node("assistant", "given up", 1, True),
        node("assistant", "\x1b[31mB\x1b[0m", 1, True),
    ]
    calls = [
        {"node": 2, "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}, "finish_reason": "stop"},
        {"node": 3, "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}, "finish_reason": "stop"},
    ]
    found = {
        "version": 1,
        "id": "t",
        "task": {"type": "Toy", "data": {"idx": 0, "prompt": "Which?"}, "key": "toy-0", "hash": "ab"},
        "agent": {"config": {"model": "m"}, "name": agent, "trainable": True},
        "nodes": nodes,
        "calls": calls,
        "rewards": {"exact": {"score": reward, "weight": 0.8}, "format": {"score": 1.0, "weight": 0.2}},
        "metrics": {"turns": 1.0},
        "is_completed": True,
        "ok": True,
        "stop_condition": "done",
        "errors": [],
    }
    return found | more


def episode(key, *traces, **more):
    found = {
        "id": "e",
        "env": {"id": "acme/toy-env"},
        "task": {"type": "Toy", "data": {"idx": 0}, "key": key, "hash": "ab"},
        "ok": True,
        "errors": [],
        "traces": list(traces),
    }
    return found | more


def write_traces(folder, episodes, torn="", **settings):
    (folder / "configs" / "resolved").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in episodes)
    (folder / "traces.jsonl").write_text(lines + torn)
    known = {
        "model": "m",
        "num_tasks": 3,
        "num_rollouts": 2,
        "env": {"taskset": {"id": "toy-env"}},
        "client": {"base_url": "http://x", "headers": {"X": "secret"}},
        "sampling": {"temperature": 0.7},
    }
    (folder / "configs" / "resolved" / "eval.json").write_text(json.dumps(known | settings))
    return folder
