"""LoRA adapters through PEFT: attach, save as safetensors, load with every check."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.config.schema import LoraSection
from harness.core.canonical import sha256_file
from harness.core.errors import ConfigError, InfraError
from harness.core.files import fsync_dir, step_folders
from harness.core.seeds import derive_seed

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Targets:
    """What `all-linear` stands for in a model type, in the words PEFT understands.

    Args:
        modules: names of linear layers.
        parameters: names of weights that PEFT adapts as parameters, dotted suffixes.
    """

    modules: str | tuple[str, ...] = "all-linear"
    parameters: tuple[str, ...] = ()


_MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = {
    # PEFT 0.21 reads every `gate_proj`, `up_proj` and `down_proj` of this type as an expert's, whatever asks for
    # them: the gate of the attention and the dense and shared MLPs then silently get no adapter, and `all-linear`
    # adapts the router instead. As parameters they are found by their full names.
    "afmoe": Targets(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        (
            "self_attn.gate_proj.weight",
            *(f"mlp.{name}.weight" for name in _MLP),
            *(f"mlp.shared_experts.{name}.weight" for name in _MLP),
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
        ),
    )
}
"""Model types for which PEFT's own `all-linear` is wrong; the others take it."""
NEVER_ADAPTED = re.compile(r"(^|\.)router(\.|$)")
"""A router decides which experts see a token: moving it breaks the match of sampler and trainer."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """One weight of the base model that has an adapter.

    Args:
        name: of the weight in the base model, such as `model.layers.0.self_attn.q_proj.weight`.
        shape: of the weight; three numbers for the stacked weights of experts.
        layer: the PEFT layer that holds the adapter.
    """

    name: str
    shape: tuple[int, ...]
    layer: Any

    @property
    def kind(self) -> str:
        """The name inside a block: `self_attn.q_proj.weight`."""
        return self.name.split(".layers.", 1)[-1].split(".", 1)[-1]

    @property
    def parameters(self) -> int:
        """Numbers in the adapter."""
        return self.a.numel() + self.b.numel()

    @property
    def a(self) -> Tensor:
        """The factor that reads the input: (rank, in), or (experts * rank, in)."""
        weight: Tensor = self.layer.lora_A["default"].weight
        return weight

    @property
    def b(self) -> Tensor:
        """The factor that writes the output: (out, rank), or (out, rank * experts)."""
        weight: Tensor = self.layer.lora_B["default"].weight
        return weight

    @property
    def base(self) -> torch.nn.Parameter:
        """The frozen weight itself."""
        if isinstance(self.layer, ParamWrapper):
            parameter: torch.nn.Parameter = self.layer.get_param()
            return parameter
        weight: torch.nn.Parameter = self.layer.get_base_layer().weight
        return weight


def adapted_weights(model: PeftModel) -> list[Adapted]:
    """Return every weight that has an adapter, in the model's order."""
    found = []
    for path, module in model.get_base_model().named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = path.replace(".base_layer", "")  # several parameters of one module are wrapped one around the other
        layer: Any = module
        wrapped = isinstance(module, ParamWrapper)
        name = f"{name}.{layer.parameter_name if wrapped else 'weight'}"
        base = layer.get_param() if wrapped else layer.get_base_layer().weight
        found.append(Adapted(name, tuple(base.shape), module))
    return found


def left_out(model: PeftModel) -> list[str]:
    """Return the weight matrices of the blocks without an adapter, routers aside; the list should be empty."""
    adapted = {weight.name for weight in adapted_weights(model)}
    names = (
        (name.replace(".base_layer", ""), parameter)
        for name, parameter in model.get_base_model().named_parameters()
        if ".lora_" not in name
    )
    return [
        name
        for name, parameter in names
        if parameter.ndim >= 2 and ".layers." in name and name not in adapted and not NEVER_ADAPTED.search(name)
    ]


def _settings_for(model: Any, section: LoraSection) -> LoraConfig:
    targets = TARGETS.get(getattr(model.config, "model_type", ""), Targets(section.targets))
    if targets.parameters and section.dropout:
        raise ConfigError(
            f"lora.dropout is {section.dropout:g}, but weights of type {model.config.model_type} are adapted as "
            "parameters, which have no dropout",
            "use --set lora.dropout=0",
        )
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT accepts fractions
        lora_dropout=section.dropout,
        target_modules=list(targets.modules) if isinstance(targets.modules, tuple) else targets.modules,
        target_parameters=list(targets.parameters) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )


def attach_lora(model: Any, section: LoraSection, seed: int) -> PeftModel:
    """Wrap a base model with freshly initialised adapters; B is zero, so outputs do not change.

    Args:
        model: the frozen base model.
        section: rank, alpha, dropout, targets.
        seed: the run's seed; decides the initialisation of A.

    Raises:
        ConfigError: dropout where the model type has none, or a weight matrix that would be left out.
    """
    config = _settings_for(model, section)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        wrapped = get_peft_model(model, config)
    device = model.get_input_embeddings().weight.device
    for parameter in trainable(wrapped).values():  # PEFT puts them beside weights that may only visit the device
        parameter.data = parameter.data.to(device)
    missed = left_out(wrapped)
    if missed:
        raise ConfigError(
            f"{len(missed)} weight matrices would get no adapter, {missed[0]} among them",
            "`harness model check` lists what is adapted; use a model type of docs/models.md",
        )
    return wrapped


def trainable(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """Return the adapter parameters by name, in a fixed order."""
    return {name: p for name, p in sorted(model.named_parameters()) if p.requires_grad}


def stored_adapters(run_dir: Path) -> dict[int, Path]:
    """Return the adapters of a run that are stored whole, by step in ascending order."""
    return {step: folder for step, folder in step_folders(run_dir / "adapters") if (folder / WEIGHTS).exists()}


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
        if "lora_A" in name and not _has_rank(tensor.shape, section.rank):  # before a wrong rank asks for memory
            raise InfraError(f"the adapter in {folder} does not fit the model or its settings: {name}", hint)
    if not state:
        raise InfraError(f"the adapter in {folder} holds no weights", hint)
    return section, state


def _has_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether a factor A of this shape has the rank, once or for each of several experts."""
    return len(shape) == 2 and shape[0] > 0 and shape[0] % rank == 0


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
