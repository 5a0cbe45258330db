"""A program with one run whose life is driven by events."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.types import FailureClass
from harness.evaluation.records import ItemRecord, write_items
from harness.evaluation.summary import summarise
from harness.ledger import Ledger
from harness.program import Program, protocol_hashes

GOAL = """Be right more often.

```toml
[gate]
baseline = "base_run_prompt"

[[env]]
id = "e"
metric = "accuracy"
threshold = 0.5
min_gain = 0.05
not_below = ["format"]
```
"""
CONTEXT = """Frozen.

```toml
[model]
name = "m"

[[eval.env]]
id = "e"
items = 40
max_tokens = 64
```
"""
RUN = "run-001"


def make_items(right, n=40):
    return [
        ItemRecord(
            f"t{k:02d}",
            f"c{k}",
            0,
            0.7 * (k < right) + 0.1,
            {"accuracy": float(k < right), "format": 1.0},
            {},
            None if k < right else FailureClass.MODEL,
        )
        for k in range(n)
    ]


@dataclass
class World:
    """A program with one run, driven through its life by events."""

    program: Program

    @property
    def ledger(self):
        return Ledger(self.program.ledger)

    def create(self, type="training", prompt="few-shot"):
        config = {"env": [{"id": "e", "prompt": prompt}]}
        data = {"type": type, "hypothesis": "h", "config_sha": "c0", "basis": {"config": config}}
        self.ledger.append(RUN, "created", data | {"protocol": protocol_hashes(self.program)})
        return self

    def start(self, attempt=1, resumed_from=None):
        data = {"attempt": attempt, "host": "h", "pid": 1, "resumed_from": resumed_from}
        self.ledger.append(RUN, "started", data | {"protocol": protocol_hashes(self.program)})
        return self

    def evaluate(self, subject, items, *, step=20, attempt=1, prompt="run", **changes):
        suffix = "" if prompt == "run" else f".{prompt}"
        file = self.program.analysis_dir(RUN) / "evals" / f"step_{step}.{subject}.e{suffix}.jsonl"
        sha = write_items(file, items)
        data = {
            "attempt": attempt,
            "subject": subject,
            "step": step,
            "env": "e",
            "prompt": prompt,
            "prompt_sha": f"P-{prompt}",
            "items_sha": "I",
            "file": self.program.relative(file),
            "file_sha": sha,
            "verifier": "v1",
        }
        self.ledger.append(RUN, "evaluated", data | summarise(items, requested=40) | changes)
        return self

    def finish(self, attempt=1, outcome="completed", failure=None, step=20, adapter="A20"):
        data = {"attempt": attempt, "outcome": outcome, "failure": failure, "step": step, "adapter_sha": adapter}
        self.ledger.append(RUN, "finished", data)
        return self

    def complete(self, right=30):
        return (
            self.create().start().evaluate("base", make_items(8), step=0).evaluate("policy", make_items(right)).finish()
        )

    @property
    def run(self):
        return self.ledger.state().runs[RUN]

    def kinds(self):
        return [event.kind for event in self.run.events]

    def tree(self):
        root = self.program.root
        return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
