"""LoRA adapters through PEFT: attach, save as safetensors, load with every check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from harness.config.schema import LoraSection
from harness.core.canonical import sha256_file
from harness.core.errors import InfraError
from harness.core.files import fsync_dir
from harness.core.seeds import derive_seed

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"


def attach_lora(model: Any, section: LoraSection, seed: int) -> PeftModel:
    """Wrap a base model with freshly initialised adapters; B is zero, so outputs do not change.

    Args:
        model: the frozen base model.
        section: rank, alpha, dropout, targets.
        seed: the run's seed; decides the initialisation of A.
    """
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT accepts fractions
        lora_dropout=section.dropout,
        target_modules=section.targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        return get_peft_model(model, config)


def trainable(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """Return the adapter parameters by name, in a fixed order."""
    return {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}


def save_adapter(model: PeftModel, folder: Path) -> str:
    """Write the adapter in PEFT's layout, whole or not at all; return the weights' SHA-256.

    Raises:
        InfraError: when the disk refuses.
    """
    working = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(working, ignore_errors=True)
    try:
        working.mkdir(parents=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
        save_file(dict(sorted(state.items())), working / WEIGHTS, metadata={"format": "pt"})
        settings = model.peft_config["default"].to_dict()
        # sets and enums become lists and strings; the base path is this machine's and says nothing to others
        settings = json.loads(json.dumps(settings, default=lambda v: sorted(v) if isinstance(v, set) else str(v)))
        settings["base_model_name_or_path"] = None
        settings["inference_mode"] = True
        (working / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        working.rename(folder)
        fsync_dir(folder.parent)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise InfraError(f"cannot write the adapter {folder}: {error}", "free disk space and resume") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return sha256_file(folder / WEIGHTS)


def read_adapter(folder: Path) -> tuple[LoraSection, dict[str, torch.Tensor]]:
    """Read an adapter folder: settings and weights, everything checked.

    Raises:
        InfraError: a file is missing, is no safetensors, does not fit its settings, or holds NaN.
    """
    hint = "take another step's adapter (outputs/<run>/adapters/), or train it again with launch --resume"
    try:
        settings = json.loads((folder / SETTINGS).read_text())
        state = load_file(folder / WEIGHTS)
        section = LoraSection(rank=settings["r"], alpha=settings["lora_alpha"], dropout=settings["lora_dropout"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        what = " ".join(str(error).split())[:300]  # pydantic writes several lines
        raise InfraError(f"the adapter in {folder} is missing or corrupt: {what}", hint) from error
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise InfraError(f"the adapter in {folder} holds non-finite numbers or whole ones in {name}", hint)
        if "lora_A" in name and tensor.shape[:1] != (section.rank,):  # before a wrong rank asks for memory
            raise InfraError(f"the adapter in {folder} does not fit the model or its settings: {name}", hint)
    if not state:
        raise InfraError(f"the adapter in {folder} holds no weights", hint)
    return section, state


def load_adapter(model: Any, folder: Path) -> PeftModel:
    """Wrap a base model with the adapter stored in `folder`.

    Raises:
        InfraError: as `read_adapter`, or when the tensors do not fit the model.
    """
    section, state = read_adapter(folder)
    wrapped = attach_lora(model, section, seed=0)
    expected = get_peft_model_state_dict(wrapped)
    wrong = sorted(set(expected) ^ set(state)) or [n for n in state if expected[n].shape != state[n].shape]
    if wrong:
        raise InfraError(
            f"the adapter in {folder} does not fit the model: {wrong[0]}", "use the model it was trained on"
        )
    set_peft_model_state_dict(wrapped, state)
    return wrapped
