"""One gradient without a limit of memory and two under RLIMIT_AS, in a process that is thrown away afterwards.

Prints one JSON line: what happened when passes are estimated before they begin, and when only the allocator fails.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile

import psutil
import torch
from safetensors.torch import load_file, save_file

from harness.config.schema import OptimizerSection, TrainSection
from harness.inference.lora import trainable
from harness.training.optimizer import build_optimizer
from harness.training.policy import update_policy
from harness.training.room import NoRoomError, Room
from tests.torch_support import tiny_llama, with_adapter
from tests.training.reference import random_group, relative_difference

GROUPS, ROWS, LENGTH = 24, 4, 100


class Watched(Room):
    """A room that counts passes and refusals, and may be blind to what is free."""

    passes = refused = 0
    blind = False

    def check(self, *arguments):
        """Count; look only when it is not blind."""
        type(self).passes += 1
        try:
            if not self.blind:
                super().check(*arguments)
        except NoRoomError:
            type(self).refused += 1
            raise


def update(room):
    """Return what one step of plain gradient descent adds to the adapter."""
    wrapped = with_adapter(tiny_llama(layers=6))
    parameters = trainable(wrapped)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    optimizer = build_optimizer(parameters, OptimizerSection(name="sgd", momentum=0.0, learning_rate=100.0))
    advantages = [0.5, -0.5, 0.25, -0.25]
    groups = [random_group(f"t{i}", [7] * 20 + [20 + i], [LENGTH] * ROWS, advantages, 128, i) for i in range(GROUPS)]
    section = TrainSection(entropy_beta=0.0, microbatch_tokens=room.tokens)
    update_policy(wrapped.get_base_model(), list(parameters.values()), optimizer, groups, section, 1e9, room=room)
    return {name: value.detach() - before[name] for name, value in parameters.items()}


def peak_space():
    """Return the largest address space so far, in bytes."""
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmPeak")).split()[1]) * 1024


def limited(blind, whole):
    """Do the step in the space there is; return what happened."""
    Watched.passes, Watched.refused, Watched.blind = 0, 0, blind
    room = Watched(100_000)
    difference = relative_difference(update(room), whole)
    return {
        "events": room.lowered,
        "passes": Watched.passes,
        "refused": Watched.refused,
        "difference": difference,
        "tokens": room.tokens,
    }


def unlimited(file):
    """Store the step in one pass; print the bytes of address space it took."""
    Watched.blind = True
    before = psutil.Process().memory_info().vms
    save_file(update(Watched(100_000)), file)
    print(peak_space() - before)


def main():
    """Compare the three."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        unlimited(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/step.safetensors"
        # in a process of its own: the heap it leaves behind would be room that no limit sees
        done = subprocess.run([sys.executable, __file__, file], check=True, capture_output=True, text=True)
        whole, taken = load_file(file), int(done.stdout.splitlines()[-1])
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + taken // 3, resource.RLIM_INFINITY))
    print(json.dumps({"estimated": limited(False, whole), "caught": limited(True, whole)}))


if __name__ == "__main__":
    main()
