"""Write tests/training/data/trl_losses.json: what TRL's own GRPOTrainer computes on seeded tensors.

Run it with an interpreter that has TRL (`pip install trl`), which this project does not need otherwise:

    python scripts/trl_reference.py

The trainer's methods `_compute_loss` and `_generate_and_score_completions` run as they are; only what surrounds
them is put in by hand: the sampled ids, the log probabilities a model would give, and the rewards.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOTrainer
from trl import __version__ as trl_version

TARGET = Path(__file__).parents[1] / "tests" / "training" / "data" / "trl_losses.json"
GROUP = 4
LENGTHS = (5, 1, 7, 3, 4, 9, 2, 6)
MAX_TOKENS = 12
CLIP_LOW, CLIP_HIGH, CISPO_CAP = 0.2, 0.28, 1.3
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": {"epsilon_high": CISPO_CAP},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


def tensors() -> dict[str, torch.Tensor]:
    """Return padded (8, 9) log probabilities of four policies, the mask, and (8,) advantages."""
    generator = torch.Generator().manual_seed(20)
    shape = (len(LENGTHS), max(LENGTHS))
    old = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1

    def near(spread: float) -> torch.Tensor:
        return old + spread * torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "logprobs": near(0.3),
        "old": old,
        "sampler": near(0.1),
        "reference": near(0.4),
        "mask": (torch.arange(shape[1])[None, :] < torch.tensor(LENGTHS)[:, None]).double(),
        "advantages": torch.tensor([0.75, -0.25, -0.25, -0.25, 0.5, -0.5, 1.0, -1.0], dtype=torch.float64),
    }


class NoModel(torch.nn.Linear):
    """Stands where the trainer keeps its model, which is never called."""

    is_gradient_checkpointing = False


def trainer(settings: dict[str, Any]) -> Any:
    """Return a GRPOTrainer that was not constructed, with the attributes the two methods read."""
    made = GRPOTrainer.__new__(GRPOTrainer)
    defaults: dict[str, Any] = {
        "accelerator": Accelerator(cpu=True),
        "model": NoModel(1, 1),
        "args": SimpleNamespace(
            use_bias_correction_kl=True,
            delta=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=len(LENGTHS),
            report_to=[],
        ),
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": CLIP_LOW,
        "epsilon_high": CLIP_HIGH,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_TOKENS,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
    }
    for name, value in (defaults | settings).items():
        setattr(made, name, value)
    return made


def loss_case(data: dict[str, torch.Tensor], settings: dict[str, Any], weights: Any = None) -> dict[str, Any]:
    """Return the loss and its gradient by the log probabilities."""
    logprobs = data["logprobs"].clone().requires_grad_()
    made = trainer(settings)
    made._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros(logprobs.shape, dtype=torch.long),
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "num_items_in_batch": data["mask"].sum(),
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["reference"],
    }
    if weights is not None:
        inputs["importance_sampling_ratio"] = weights
    loss = made._compute_loss(made.model, inputs)
    loss.backward()
    return {
        "loss": float(loss.detach()),
        "gradient": (logprobs.grad * data["mask"]).tolist() if logprobs.grad is not None else [],
    }


def scored(data: dict[str, torch.Tensor], rewards: torch.Tensor, **settings: Any) -> Any:
    """Return what TRL makes of sampled completions with these (8, K) rewards."""
    ids = [[3] * length for length in LENGTHS]
    sampler = [row[:length].tolist() for row, length in zip(data["sampler"], LENGTHS, strict=True)]
    made = trainer(
        {
            "scale_rewards": "group",
            "multi_objective_aggregation": "sum_then_normalize",
            "environment_factories": None,
            "environments": None,
            "tools": [],
            "pad_to_multiple_of": None,
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "mask_truncated_completions": False,
            "num_iterations": 1,
            "num_generations": GROUP,
            "reward_funcs": [None] * rewards.shape[1],
            "reward_func_names": [f"r{k}" for k in range(rewards.shape[1])],
            "reward_weights": torch.tensor([1.0, 0.5][: rewards.shape[1]]).double(),
            "_logs": defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
            "_pending_extra_logs": {},
            "_pending_metrics": {},
            "log_multimodal": False,
        }
        | settings
    )
    made._generate = lambda _: (
        [[1]] * len(LENGTHS), ids, None, [""] * len(LENGTHS), sampler, {}, None, [],
    )  # fmt: skip
    made._get_per_token_logps_and_entropies = lambda *_, **__: (data["old"], None, None)
    made._calculate_rewards = lambda *_, **__: rewards
    return made._generate_and_score_completions([{"prompt": "p"}] * len(LENGTHS))


def importance_cases(data: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return TRL's importance weights and the loss under them, by mode."""
    cases = {}
    for mode, cap in (("token_truncate", 1.1), ("sequence_mask", 1.01)):
        settings = {
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": None,
            "vllm_importance_sampling_clip_max": cap,
        }
        weights = scored(data, torch.ones(len(LENGTHS), 1).double(), **settings)["importance_sampling_ratio"].double()
        whole = weights.expand_as(data["mask"]) * data["mask"]
        flags = {key: settings[key] for key in ("use_vllm", "vllm_importance_sampling_correction")}
        cases[mode] = {"cap": cap, "weights": whole.tolist()} | loss_case(data, flags, weights)
    return cases


def advantage_cases(data: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return TRL's advantages of two groups of four, by how they are scaled."""
    rewards = torch.tensor(
        [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.25, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.5, 1.0]]
    ).double()
    cases = {
        name: scored(data, rewards[:, :1], scale_rewards=scale)["advantages"].tolist()
        for name, scale in (("mean", "none"), ("mean_std", "group"), ("batch_std", "batch"))
    }
    merged = scored(data, rewards, multi_objective_aggregation="normalize_then_sum")["advantages"].tolist()
    unscorable = rewards[:, :1].clone()
    unscorable[1] = torch.nan
    missing = scored(data, unscorable, scale_rewards="none")["advantages"].tolist()
    return (
        {"rewards": rewards.tolist(), "weights": [1.0, 0.5]} | cases | {"component": merged, "mean_without_1": missing}
    )


def main() -> int:
    """Write the file and say where."""
    data = tensors()
    losses = {name: loss_case(data, {"loss_type": name} | settings) for name, settings in SETTINGS.items()}
    with_kl = {
        name: loss_case(data, {"loss_type": name, "beta": 0.05} | settings)
        for name, settings in SETTINGS.items()
        if name != "gspo"  # TRL multiplies the KL by the ratio of the sequence there, this project by the token's
    }
    result = {
        "trl": trl_version,
        "torch": torch.__version__,
        "lengths": LENGTHS,
        "max_tokens": MAX_TOKENS,
        "clip_low": CLIP_LOW,
        "clip_high": CLIP_HIGH,
        "cispo_cap": CISPO_CAP,
        "kl_beta": 0.05,
        "inputs": {name: tensor.tolist() for name, tensor in data.items()},
        "losses": losses,
        "losses_with_kl": with_kl,
        "importance": importance_cases(data),
        "advantages": advantage_cases(data),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    sys.stdout.write(f"wrote {TARGET}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
