"""`harness model`: what a model weighs before it is loaded, and whether it trains and samples as one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import output
from harness.cli.output import Line, Result, Styled, fields, table
from harness.cli.progress import quiet_libraries
from harness.cli.shared import command, new_app
from harness.core.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from harness.config.schema import LoraSection, ModelSection
    from harness.inference.memory import Footprint
    from harness.inference.parity import Check

app = new_app(
    "harness model show smollm2-135m",
    "harness model check smollm2-135m",
    no_args_is_help=True,
    help="Show what a model weighs, and check that it trains and samples as one.",
)
APPS = {"model": app}

NameArg = Annotated[str, typer.Argument(metavar="NAME", help="An embedded name, a folder, or a Hub id owner/name.")]
Revision = Annotated[str, typer.Option(metavar="COMMIT", help="Commit of a Hub id, 40 hex digits.")]
Dtype = Annotated[str, typer.Option(metavar="DTYPE", help="auto, float32, bfloat16 or float64.")]
Rank = Annotated[int, typer.Option(min=1, help="Rank of the adapters.")]
Load = Annotated[str, typer.Option(metavar="LOAD", help="full, nf4 or offload, as model.load of a run.")]
GIB = 1024**3


@command(
    app,
    "check",
    "harness model check smollm2-135m",
    "harness model check ./my-model --json",
    "harness model check owner/name --revision <40 hex digits> --dtype bfloat16",
)
def check(
    name: NameArg,
    revision: Revision = "",
    dtype: Dtype = "float32",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or mps.")] = "auto",
    rank: Rank = 16,
    alpha: Annotated[float, typer.Option(min=0, help="Scale of the adapters.")] = 32.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the adapters' random numbers.")] = 0,
    load: Load = "full",
) -> Result:
    """Load a model and compare trainer, sampler, plain transformers and plain PEFT on it.

    Exits 1 when a check fails. In float32 log probabilities may differ by 1e-4; in bfloat16 the bounds are a
    mean of 0.06 and a 99th percentile of 0.25. Nothing is written but a temporary adapter.
    """
    section, adapters = _sections(name, revision, dtype, device, rank, alpha, load)
    quiet_libraries()
    from harness.inference.models import load_model
    from harness.inference.parity import check_model
    from harness.training.parts import trainer

    output.narrate(f"loading {name}")
    loaded = load_model(section)
    done: list[Check] = []
    for found in check_model(loaded, adapters, trainer(), seed):
        output.narrate(f"{found.name}: {'pass' if found.passed else 'FAIL'}")
        done.append(found)
    failed = [found.name for found in done if not found.passed]
    data = {
        "model": name,
        "revision": revision or None,
        "type": loaded.model.config.model_type,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "lora": {"rank": rank, "alpha": alpha},
        "passed": not failed,
        "failed": failed,
        "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail, "numbers": dict(c.numbers)} for c in done],
    }
    return Result(data, lambda: _check_lines(name, done), ExitCode.NO if failed else ExitCode.OK)


def _check_lines(name: str, done: list[Check]) -> list[Line]:
    width = max(len(found.name) for found in done)
    lines: list[Line] = []
    for found in done:
        mark = Styled("pass", "good") if found.passed else Styled("FAIL", "bad")
        lines.append((mark, f"  {found.name:<{width}}  {found.detail}"))
    failed = sum(not found.passed for found in done)
    verdict = Styled(f"{failed} of {len(done)} checks failed", "bad") if failed else "all checks passed"
    return [*lines, "", (f"{name}: ", verdict)]


@command(
    app,
    "show",
    "harness model show smollm2-135m",
    "harness model show ./my-model --dtype bfloat16 --rank 32 --prompt-tokens 4000 --completion-tokens 512",
    "harness model show owner/name --revision <40 hex digits> --load offload --json",
)
def show(
    name: NameArg,
    revision: Revision = "",
    dtype: Dtype = "bfloat16",
    rank: Rank = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 600,
    completion_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 64,
    group_size: Annotated[int, typer.Option(min=1, help="Completions of a prompt, trained in one pass.")] = 8,
    load: Load = "full",
) -> Result:
    """Show a model's parameters by part and the memory that training it needs, from config.json alone.

    No weight is read: the model and one training pass are run on tensors with shapes and no content, so the
    bytes kept for the backward pass are those of the real one. Libraries and the allocator come on top.
    """
    section, adapters = _sections(name, revision, dtype, "auto", rank, 2.0 * rank, load)
    quiet_libraries()
    from harness.inference.memory import Workload, footprint
    from harness.inference.models import config_folder, pick_device, pick_dtype
    from harness.training.parts import trainer

    folder = config_folder(name, section.revision)
    chosen = pick_dtype(section.dtype, pick_device("auto"))
    work = Workload(prompt_tokens, completion_tokens, group_size)
    found = footprint(folder, adapters, chosen, work, trainer(), section.load)
    kind = str(chosen).removeprefix("torch.")
    data = _footprint_data(found) | {"model": name, "revision": revision or None, "dtype": kind, "rank": rank}
    data["load"] = section.load
    data["workload"] = {"prompt": prompt_tokens, "completion": completion_tokens, "group": group_size}
    return Result(data, lambda: _footprint_lines(name, kind, rank, work, found))


def _footprint_data(found: Footprint) -> dict[str, Any]:
    from dataclasses import asdict

    derived = ("parameters", "training_bytes", "sampling_bytes")
    return asdict(found) | {key: getattr(found, key) for key in derived}


def _footprint_lines(name: str, kind: str, rank: int, work: Any, found: Footprint) -> list[Line]:
    rows = [(part, f"{count:,}", f"{count / found.parameters:.1%}") for part, count in found.parts.items()]
    rows.append(("in all", f"{found.parameters:,}", "100.0%"))
    copies = f", {_gib(found.copy_bytes)} of it copies of weights with their adapter" if found.copy_bytes else ""
    tokens = f"{work.prompt} + {work.group} × {work.completion} tokens"
    return [
        (Styled(name, "strong"), f" in {kind}"),
        "",
        *table(["part", "parameters", "share"], rows, right="parameters share"),
        "",
        *fields(
            [
                ("a token meets", f"{found.active:,} parameters"),
                ("weights", _gib(found.weight_bytes)),
                *([("  at rest", f"{_gib(found.host_bytes)} in memory or files")] if found.host_bytes else []),
                ("adapters", f"{found.adapter_parameters:,} parameters of rank {rank}"),
                ("  with AdamW", f"{_gib(found.adapter_bytes)} (weight, gradient, two moments, float32)"),
                ("activations", f"{_gib(found.activation_bytes)} for {tokens}{copies}"),
                ("logits", f"{_gib(found.logit_bytes)} at a time"),
                ("sampling", f"{_gib(found.cache_bytes)} of keys and values"),
                ("training needs", Styled(_gib(found.training_bytes), "strong")),
                ("sampling needs", _gib(found.sampling_bytes)),
            ]
        ),
    ]


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 2 else f"{count / 2**20:.1f} MiB"


def _sections(
    name: str, revision: str, dtype: str, device: str, rank: int, alpha: float, load: str
) -> tuple[ModelSection, LoraSection]:
    """Return the sections of a run config that the options stand for, checked by its schema."""
    from pydantic import ValidationError

    from harness.config.schema import LoraSection, ModelSection

    try:
        kinds: Any = {"dtype": dtype, "device": device, "load": load}
        model = ModelSection(name=name, revision=revision or None, **kinds)
        return model, LoraSection(rank=rank, alpha=alpha)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"--{'-'.join(map(str, first['loc']))}: {first['msg']}", "harness model check --help"
        ) from None
