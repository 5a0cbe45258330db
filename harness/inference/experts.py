"""The two file layouts of adapters on the experts of a mixture: stacked (PEFT) and one by one (vLLM, prime-rl).

PEFT adapts the stacked weights of all experts of a layer at once and wraps the second one around the first, so a
file of it holds, for E experts of a layer, rank r, hidden size H and expert size I:

    …mlp.experts.base_layer.lora_A.weight   (E r, H)    gate and up together: input side
    …mlp.experts.base_layer.lora_B.weight   (2 I, r E)  output side, gate above up
    …mlp.experts.lora_A.weight              (E r, I)    down: input side
    …mlp.experts.lora_B.weight              (H, r E)    output side

Row e·r + i of A belongs to expert e and rank i, column i·E + e of B too (PEFT 0.21, `ParamWrapper.get_delta_weight`).
Engines that know experts one by one read instead, for each expert e:

    …mlp.experts.e.{gate_proj,up_proj,down_proj}.lora_{A,B}.weight

Gate and up then share their A. All other tensors have one name in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.inference.lora import SETTINGS, WEIGHTS

_STACKED = re.compile(r"^(?P<layer>.*\.experts)(?P<inner>\.base_layer)?\.lora_(?P<factor>[AB])\.weight$")
_SINGLE = re.compile(r"^(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.lora_(?P<factor>[AB])\.weight$")


def per_expert(state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return an adapter in the layout of one expert after the other.

    Args:
        state: tensors of an adapter file in PEFT's layout; those of other weights are passed on as they are.
        rank: r of the adapter; it decides how many experts a stacked factor holds.

    Raises:
        ValueError: when the factors of a layer do not fit each other.
    """
    result = {name: tensor for name, tensor in state.items() if not _STACKED.match(name)}
    layers = sorted({match["layer"] for name in state if (match := _STACKED.match(name))})
    for layer in layers:
        try:
            gate_up = [state[f"{layer}.base_layer.lora_{factor}.weight"] for factor in "AB"]
            down = [state[f"{layer}.lora_{factor}.weight"] for factor in "AB"]
        except KeyError as error:
            raise ValueError(f"{layer} lacks the factor {error}") from None
        _check(layer, gate_up, down, rank)
        half = gate_up[1].shape[0] // 2
        for expert in range(gate_up[0].shape[0] // rank):
            a, b = _of_expert(gate_up, expert, rank)
            down_a, down_b = _of_expert(down, expert, rank)
            for name, pair in {
                "gate_proj": (a, b[:half]),
                "up_proj": (a.clone(), b[half:]),
                "down_proj": (down_a, down_b),
            }.items():
                for factor, tensor in zip("AB", pair, strict=True):
                    result[f"{layer}.{expert}.{name}.lora_{factor}.weight"] = tensor.contiguous()
    return result


def stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter in PEFT's layout of stacked experts: the inverse of `per_expert`.

    Raises:
        ValueError: when an expert lacks a factor, or its gate and up have an A each, which one stacked factor
            cannot hold.
    """
    result = {name: tensor for name, tensor in state.items() if not _SINGLE.match(name)}
    counts: dict[str, int] = {}
    for name in state:
        if match := _SINGLE.match(name):
            counts[match["layer"]] = max(counts.get(match["layer"], 0), int(match["expert"]) + 1)
    for layer, experts in sorted(counts.items()):

        def factors(name: str, factor: str, layer: str = layer, experts: int = experts) -> list[Tensor]:
            try:
                return [state[f"{layer}.{expert}.{name}.lora_{factor}.weight"] for expert in range(experts)]
            except KeyError as error:
                raise ValueError(f"{layer} lacks the factor {error}") from None

        gate_a, up_a = factors("gate_proj", "A"), factors("up_proj", "A")
        if not all(torch.equal(gate, up) for gate, up in zip(gate_a, up_a, strict=True)):
            raise ValueError(f"gate and up of {layer} have an A each: no stacked adapter of this rank equals them")
        both = [torch.cat(pair) for pair in zip(factors("gate_proj", "B"), factors("up_proj", "B"), strict=True)]
        result[f"{layer}.base_layer.lora_A.weight"] = torch.cat(gate_a)
        result[f"{layer}.base_layer.lora_B.weight"] = torch.stack(both, dim=2).flatten(1)
        result[f"{layer}.lora_A.weight"] = torch.cat(factors("down_proj", "A"))
        result[f"{layer}.lora_B.weight"] = torch.stack(factors("down_proj", "B"), dim=2).flatten(1)
    return result


def per_expert_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter_config.json that goes with `per_expert`: every adapted layer by name, no parameters."""
    names = set(settings["target_modules"] or ())
    for parameter in settings.get("target_parameters") or ():
        path = parameter.removesuffix(".weight")
        fused = path.endswith(".gate_up_proj")
        names |= {"gate_proj", "up_proj"} if fused else {path.rpartition(".")[2]}
    return {**settings, "target_modules": sorted(names), "target_parameters": None}


def rewrite_per_expert(folder: Path) -> None:
    """Rewrite an adapter folder from PEFT's layout into the one of single experts.

    Raises:
        ValueError: as `per_expert`.
        OSError, SafetensorError: the folder cannot be read or written.
    """
    settings = json.loads((folder / SETTINGS).read_text())
    tensors = per_expert(load_file(folder / WEIGHTS), settings["r"])
    save_file(dict(sorted(tensors.items())), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / SETTINGS).write_text(json.dumps(per_expert_settings(settings), indent=2, sort_keys=True) + "\n")


def _of_expert(factors: list[Tensor], expert: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return (rank, in) and (out, rank) of one expert."""
    a, b = factors
    return a.view(-1, rank, a.shape[1])[expert], b.view(b.shape[0], rank, -1)[:, :, expert]


def _check(layer: str, gate_up: list[Tensor], down: list[Tensor], rank: int) -> None:
    """Hold the shapes of a layer against each other; the order in which PEFT wraps is part of its layout."""
    (a, b), (down_a, down_b) = gate_up, down
    whole = all(tensor.ndim == 2 for tensor in (a, b, down_a, down_b)) and rank > 0 and a.shape[0] % rank == 0
    fits = whole and a.shape[0] == b.shape[1] == down_a.shape[0] == down_b.shape[1]
    if not (fits and a.shape[1] == down_b.shape[0] and b.shape[0] == 2 * down_a.shape[1]):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (a, b, down_a, down_b))
        raise ValueError(f"the factors of {layer} do not fit rank {rank} and each other: {shapes}")
