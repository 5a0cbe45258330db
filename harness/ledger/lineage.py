"""The parent tree of the runs: who changed whose config, laid out line by line; pure.

Dead ends branch off and come first; the child with the longest line of descendants follows straight
below its parent. A campaign of a hundred runs then stays a few columns wide, and no edge crosses another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from harness.core.errors import NotFoundError

MAX_LANES = 20
"""Columns of branches drawn before a run in text."""


class Node(NamedTuple):
    """One run of the tree.

    Args:
        run: its id.
        parent: the run above it; None for a root.
        missing: the parent its creation names, when that one is not shown or the link would be a circle.
        depth: generations above it.
        lane: column; 0 for a root and for what follows straight below it.
        branch: whether it branches off its parent's lane.
    """

    run: str
    parent: str | None
    missing: str | None
    depth: int
    lane: int
    branch: bool

    @property
    def prefix(self) -> str:
        """The branches drawn before the run in text."""
        open_lanes = self.lane - self.branch
        bars = "│ " * open_lanes if open_lanes < MAX_LANES else "… " + "│ " * (MAX_LANES - 1)
        return bars + "├─" * self.branch


def forest(parents: Mapping[str, str | None]) -> list[Node]:
    """Lay out runs, each parent before its children.

    Args:
        parents: run → the parent its creation names, in the order in which siblings are shown.
    """
    links = _links(parents)
    children: dict[str, list[str]] = {run: [] for run in parents}
    for run, parent in links.items():
        if parent is not None:
            children[parent].append(run)
    heights = _heights(links, children)
    for found in children.values():
        found.sort(key=heights.__getitem__)  # stable: runs of one height stay in order
    nodes: list[Node] = []
    # A stack instead of recursion: a line of runs may be longer than Python's own stack.
    stack = [(run, 0, 0, False) for run in reversed(list(parents)) if links[run] is None]
    while stack:
        run, depth, lane, branch = stack.pop()
        parent = links[run]
        nodes.append(Node(run, parent, parents[run] if parent is None else None, depth, lane, branch))
        for number, child in enumerate(reversed(children[run])):
            stack.append((child, depth + 1, lane + (number > 0), number > 0))
    return nodes


def _links(parents: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return run → parent without links to unknown runs, and without the one link that closes a circle."""
    links = {run: parent if parent in parents else None for run, parent in parents.items()}
    done: set[str] = set()
    for run in parents:
        path: dict[str, None] = {}
        current: str | None = run
        while current is not None and current not in done and current not in path:
            path[current] = None
            current = links[current]
        if current is not None and current in path:
            links[current] = None
        done.update(path)
    return links


def _heights(links: Mapping[str, str | None], children: Mapping[str, list[str]]) -> dict[str, int]:
    """Return for each run how many generations follow it."""
    heights = dict.fromkeys(links, 0)
    waiting = {run: len(found) for run, found in children.items()}
    ready = [run for run, count in waiting.items() if count == 0]
    while ready:
        run = ready.pop()
        parent = links[run]
        if parent is not None:
            heights[parent] = max(heights[parent], heights[run] + 1)
            waiting[parent] -= 1
            if waiting[parent] == 0:
                ready.append(parent)
    return heights


def family(parents: Mapping[str, str | None], run: str) -> dict[str, str | None]:
    """Return the part of `parents` that is a run, its ancestors and its descendants.

    Raises:
        NotFoundError: when there is no such run.
    """
    if run not in parents:
        raise NotFoundError(f"{run} does not exist", "`harness list` shows the runs")
    children: dict[str, list[str]] = {}
    for child, parent in parents.items():
        if parent is not None:
            children.setdefault(parent, []).append(child)
    kept: set[str] = set()
    queue = [run]
    while queue:
        current = queue.pop()
        if current not in kept:
            kept.add(current)
            queue += children.get(current, [])
    above = parents[run]
    while above is not None and above in parents and above not in kept:
        kept.add(above)
        above = parents[above]
    return {name: parent for name, parent in parents.items() if name in kept}
