"""Full checkpoints: everything a bit-exact resume needs, manifest written last.

Randomness is addressed, not carried (`harness.core.seeds`), and tasks are a function of the step,
so a checkpoint is the adapter, the optimizer's moments and the numbers of the loop.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from harness.core.canonical import sha256_file
from harness.core.errors import ConfigError, InfraError
from harness.core.files import fsync_dir, step_folders

MANIFEST = "manifest.json"
_TENSORS = "state.safetensors"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the loop stood after a step.

    Args:
        step: last finished step.
        tokens: completion tokens sampled so far.
        empty_steps: consecutive steps without any usable group.
        pass_rates: running share of right answers by `environment/task`; empty without a curriculum.
    """

    step: int
    tokens: int
    empty_steps: int = 0
    pass_rates: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides rounding besides the inputs; a resume under another is not bit-exact."""

    threads: int
    capability: str
    device: str
    dtype: str
    torch_version: str

    @classmethod
    def here(cls, device: torch.device, dtype: torch.dtype) -> Numerics:
        """Describe this process."""
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
        capability = torch.backends.cpu.get_cpu_capability() + (f"/{isa}" if isa else "")
        return cls(torch.get_num_threads(), capability, device.type, str(dtype), torch.__version__)


def step_folder(parent: Path, step: int) -> Path:
    """Return the folder of a step."""
    return parent / f"step_{step}"


def save_checkpoint(
    parent: Path,
    progress: Progress,
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    numerics: Numerics,
    config_sha: str,
    keep: int,
) -> None:
    """Write `parent/step_N`, then drop all but the newest `keep` checkpoints.

    Raises:
        InfraError: when the disk refuses; earlier checkpoints are untouched.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"parameter/{name}"] = parameter.detach().cpu().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    folder = step_folder(parent, progress.step)
    working = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(working, ignore_errors=True)
    try:
        working.mkdir(parents=True)
        save_file(tensors, working / _TENSORS)
        manifest = {
            "progress": asdict(progress),
            "numerics": asdict(numerics),
            "config_sha": config_sha,
            "state_sha": sha256_file(working / _TENSORS),
        }
        with (working / _TENSORS).open("rb") as file:
            os.fsync(file.fileno())
        with (working / MANIFEST).open("w") as text:
            text.write(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
            text.flush()
            os.fsync(text.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        working.rename(folder)
        fsync_dir(parent)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise InfraError(
            f"cannot write the checkpoint {folder}: {error}", "free disk space, then `harness launch --resume`"
        ) from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
    for step in checkpoint_steps(parent)[:-keep]:
        shutil.rmtree(step_folder(parent, step), ignore_errors=True)


def checkpoint_steps(parent: Path) -> list[int]:
    """Return the steps of complete checkpoints, ascending."""
    return [step for step, folder in step_folders(parent) if (folder / MANIFEST).is_file()]


def read_manifest(parent: Path, step: int) -> dict[str, Any]:
    """Return a checkpoint's manifest after checking its tensors' hash.

    Raises:
        InfraError: when it is damaged.
    """
    folder = step_folder(parent, step)
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if sha256_file(folder / _TENSORS) != manifest["state_sha"]:
            raise ValueError("its checksum differs")
        Progress(**manifest["progress"])
        int(manifest["numerics"]["threads"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InfraError(
            f"the checkpoint {folder} is damaged: {error}", f"delete {folder} to resume from the one before it"
        ) from error
    return manifest


def load_checkpoint(
    parent: Path,
    step: int,
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    numerics: Numerics,
    config_sha: str,
) -> Progress:
    """Restore parameters and optimizer from `parent/step_N`.

    Raises:
        ConfigError: the config, the thread count or the processor is not what the run started with.
        InfraError: the checkpoint is damaged.
    """
    manifest = read_manifest(parent, step)
    if manifest["config_sha"] != config_sha:
        raise ConfigError("the config changed since the checkpoint", "make a new run instead: `harness new-run`")
    if manifest["numerics"] != asdict(numerics):
        before, now = manifest["numerics"], asdict(numerics)
        changed = ", ".join(f"{key} {before.get(key)} → {now[key]}" for key in now if before.get(key) != now[key])
        raise ConfigError(
            f"a resume here would not be bit-exact: {changed}",
            "resume on the same machine with the same thread count, or make a new run",
        )
    try:
        state = load_file(step_folder(parent, step) / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise InfraError(
            f"the checkpoint of step {step} is damaged: {error}", f"delete {step_folder(parent, step)} and resume again"
        ) from error
    _check_tensors(step_folder(parent, step), state, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[f"parameter/{name}"])
            prefix, suffix = "optimizer/", f"/{name}"
            moments = {
                key[len(prefix) : -len(suffix)]: value
                for key, value in state.items()
                if key.startswith(prefix) and key.endswith(suffix)
            }
            if moments:
                # the step counter stays on the CPU, as AdamW keeps it
                optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in moments.items()
                }
    return Progress(**manifest["progress"])


def _check_tensors(folder: Path, state: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter]) -> None:
    """Check that stored tensors are those of this run: complete, of the same shapes, finite."""
    hint = f"delete {folder} to resume from the one before it"
    wanted = {f"parameter/{name}": parameter.shape for name, parameter in parameters.items()}
    for name, tensor in state.items():
        owner = parameters.get(name.split("/", 2)[-1]) if name.startswith("optimizer/") else None
        shape = wanted.pop(name, None) if owner is None else owner.shape if tensor.dim() else tensor.shape
        if shape != tensor.shape:
            raise InfraError(f"the checkpoint {folder} does not fit the run: {name}", hint)
        if not torch.isfinite(tensor).all():
            raise InfraError(f"the checkpoint {folder} holds non-finite numbers in {name}", hint)
    if wanted:
        raise InfraError(f"the checkpoint {folder} does not fit the run: {next(iter(wanted))} is missing", hint)
