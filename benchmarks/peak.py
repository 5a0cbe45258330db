"""What this machine can do at most: multiplications of matrices a second, and bytes copied a second.

    python benchmarks/peak.py

The denominators of docs/performance.md. Shapes: square ones, and a group of 1,112 positions through SmolLM2-135M's
widest layer. float32, all cores, the best of several tries.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

SHAPES = ((576, 576, 576), (1536, 1536, 1536), (2048, 2048, 2048), (1112, 576, 1536))
COPIED = 64_000_000


def best_s(action: Callable[[], object], tries: int = 12) -> float:
    """Return the seconds of the fastest of several tries, after one that warms up."""
    action()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print one line a shape, and the copy."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for rows, inner, columns in SHAPES:
        left, right = torch.randn(rows, inner), torch.randn(inner, columns)
        out = torch.empty(rows, columns)
        seconds = best_s(lambda a=left, b=right, o=out: torch.mm(a, b, out=o))  # type: ignore[misc]
        print(f"{rows:5d} x {inner:5d} x {columns:5d}   {2 * rows * inner * columns / seconds / 1e9:7.0f} GFLOP/s")
    source, target = torch.randn(COPIED), torch.zeros(COPIED)
    print(f"copy, read and written        {8 * COPIED / best_s(lambda: target.copy_(source), 4) / 1e9:7.1f} GB/s")


if __name__ == "__main__":
    main()
