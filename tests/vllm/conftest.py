"""Tests with the real vLLM, in an environment of its own (`make test-vllm`); elsewhere they are skipped.

An engine takes half a minute to start, so tests share those that they leave as they found them.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.vllm import subjects

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is not None:
        return
    skip = pytest.mark.skip(reason="vLLM is not installed here; `make test-vllm` runs this in an environment of its own")
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
def colocated(llama):
    with subjects.start(llama) as engine:
        yield engine


@pytest.fixture(scope="session")
def served(llama):
    with subjects.start(llama, mode="server") as engine:
        yield engine
