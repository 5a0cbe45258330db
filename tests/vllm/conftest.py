"""Tests with the real vLLM, in an environment of its own (`make test-vllm`); elsewhere they are skipped.

An engine takes half a minute to start, so tests share those that they leave as they found them.
"""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.vllm import subjects

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is not None:
        return
    skip = pytest.mark.skip(reason="vLLM is not installed here; `make test-vllm` has an environment for it")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def llama(folder):
    return subjects.Subject("llama", folder)


@pytest.fixture(scope="session")
def fleet(folder, llama):
    """A server for every type of model, started side by side: most of a start is one process reading code."""
    experts = subjects.DEVICE != "cpu"  # vLLM has no kernels for adapters on experts on a processor
    others = [kind for kind in subjects.KINDS if kind != "llama"]
    found = {kind: subjects.Subject(kind, folder, adapter=kind != "afmoe" or experts) for kind in others}
    found["llama"] = llama
    with ExitStack() as stack, ThreadPoolExecutor(len(found)) as pool:
        starts = {kind: pool.submit(subjects.start, subject, "server") for kind, subject in found.items()}
        engines = {kind: stack.enter_context(start.result()) for kind, start in starts.items()}
        yield {kind: (subject, engines[kind]) for kind, subject in found.items()}


@pytest.fixture(scope="session")
def served(fleet):
    return fleet["llama"][1]


@pytest.fixture(scope="session")
def colocated(llama):
    with subjects.start(llama) as engine:
        yield engine
