"""Move the files of a renumbered run, and put back those of the run that keeps the number.

Every step looks at what is there first, so that it can be repeated. After a merge the files of two runs
lie on top of each other under one name: whose they are is told by what the config says the run is for,
and what is missing comes from the commits of either branch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomlkit

from harness.config.changes import diff
from harness.config.load import config_from, parse_config, render_config
from harness.config.schema import RunConfig
from harness.core.canonical import sha256_hex
from harness.core.errors import HarnessError, InfraError
from harness.core.files import atomic_write, disk_hint, fsync_dir
from harness.ledger import RunState, State
from harness.ledger.history import commits_with, file_at, files_at
from harness.program.model import Program

_STAGES = (":2", ":3")
"""The two sides of a file that git could not merge, in the index."""
_MARKER = b"<<<<<<< "


def relocate(program: Program, state: State, run: RunState, old: str, files: list[str], notes: list[str]) -> None:
    """Bring the files of a renumbered run to where its new number says.

    Args:
        program: the program.
        state: the fold of the ledger, with the new number.
        run: the renumbered run.
        old: the number it gave up.
        files: gets a sentence for everything that was moved or written.
        notes: gets what could not be done.

    Raises:
        InfraError: when a file cannot be moved; running it again goes on from there.
    """
    keeper = state.runs.get(old)
    try:
        if keeper is None:
            _move(program, program.config_path(old), program.config_path(run.run), files)
            _move(program, program.analysis_dir(old), program.analysis_dir(run.run), files)
            _move(program, program.run_dir(old), program.run_dir(run.run), files)
        else:
            _part(program, run, keeper, old, files, notes)
        _point_children(program, state, run, old, files)
    except OSError as error:
        raise InfraError(
            f"cannot move the files of {run.run}: {error.strerror}", f"{disk_hint(error)}; nothing is lost"
        ) from error


def _move(program: Program, source: Path, target: Path, files: list[str]) -> None:
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    fsync_dir(target.parent)
    files.append(f"moved {program.relative(source)} to {program.relative(target)}")


def _part(program: Program, run: RunState, keeper: RunState, old: str, files: list[str], notes: list[str]) -> None:
    """Tell the files of two runs apart that lie under one name."""
    own, kept = program.config_path(run.run), program.config_path(old)
    commits = commits_with(program.root, program.relative(kept), f"analysis/{old}")
    mine, theirs = _commit_of(program, run, keeper, commits), _commit_of(program, keeper, run, commits)
    for found, other, path, commit in ((run, keeper, own, mine), (keeper, run, kept, theirs)):
        if found.kind == "import" or _is_of(found, other, _bytes(path)):  # an import has no config of ours
            continue
        text = next((text for text in _configs(program, kept, commit) if _is_of(found, other, text)), None)
        if text is None:
            text = _rebuilt(found)
            if text is None:
                notes.append(f"the config of {found.run} is neither here nor in git")
                continue
            notes.append(f"{program.relative(path)} was rebuilt from the ledger; its comments are gone")
        atomic_write(path, text)
        files.append(f"wrote {program.relative(path)}, the config of {found.run}")
    own_files, kept_files = _folder(program, mine, old), _folder(program, theirs, old)
    _extract(program, run, old, own_files, files)
    _restore(program, old, own_files, kept_files, files)
    outputs = program.run_dir(old) / "config.json"
    if outputs.is_file() and _is_of(run, keeper, _toml_of(outputs)):
        _move(program, program.run_dir(old), program.run_dir(run.run), files)
    elif program.run_dir(old).exists() and not outputs.is_file():
        notes.append(f"outputs/{old}/ was left alone: nothing in it tells whose it is")


def _is_of(run: RunState, other: RunState, text: bytes | None) -> bool:
    """Tell whether a config is one run's and not the other's: by what it is for, else by its keys."""
    try:
        config = parse_config(text.decode(), "config") if text is not None else None
    except (HarnessError, ValueError):
        return False
    return config is not None and _says(run, config) and (not _says(other, config) or _has_keys(run, config))


def _says(run: RunState, config: RunConfig) -> bool:
    # Numbers are left out: that of a parent may have changed as well.
    return all(getattr(config, key) == run.created.get(key) for key in ("hypothesis", "lever"))


def _has_keys(run: RunState, config: RunConfig) -> bool:
    return not diff((run.created.get("basis") or {}).get("config") or {}, config)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _toml_of(path: Path) -> bytes | None:
    """Return the resolved config of a run directory as the TOML it came from."""
    try:
        return render_config(config_from(json.loads(path.read_bytes()), str(path))).encode()
    except (HarnessError, ValueError):
        return None


def _commit_of(program: Program, run: RunState, other: RunState, commits: list[str]) -> str | None:
    """Return the newest commit whose ledger has the one run and not the other: before the branches met."""
    for commit in commits:
        ledger = file_at(program.root, commit, program.relative(program.ledger)) or b""
        if run.root.encode() in ledger and other.root.encode() not in ledger:
            return commit
    return None


def _configs(program: Program, path: Path, commit: str | None) -> Iterator[bytes]:
    """Yield every text the config of a number has: here, at a commit, and on both sides of a conflict."""
    here = _bytes(path)
    if here is not None:
        yield here
    for place in filter(None, (commit, *_STAGES)):
        text = file_at(program.root, place, program.relative(path))
        if text is not None:
            yield text


def _rebuilt(run: RunState) -> bytes | None:
    basis = (run.created.get("basis") or {}).get("config")
    try:
        return render_config(config_from(basis, run.run)).encode() if basis else None
    except HarnessError:  # an older or newer version's config
        return None


def _folder(program: Program, commit: str | None, old: str) -> dict[str, bytes]:
    """Return the files of a run's folder under analysis/ at a commit, by path in it."""
    if commit is None:
        return {}
    start = f"analysis/{old}/"
    found = {
        name[len(start) :]: file_at(program.root, commit, name) for name in files_at(program.root, commit, start[:-1])
    }
    return {name: data for name, data in found.items() if data is not None}


def _extract(program: Program, run: RunState, old: str, mine: Mapping[str, bytes], files: list[str]) -> None:
    """Write the run's own folder under analysis/: from its branch, and what is here with a hash the ledger knows."""
    target = program.analysis_dir(run.run)
    wanted = dict(mine)
    for data in run.evals:
        start, name = f"analysis/{run.run}/", str(data.get("file") or "")
        if not name.startswith(start) or ".." in name.split("/"):
            continue
        here = _bytes(program.analysis_dir(old) / name[len(start) :])
        if here is not None and sha256_hex(here) == data.get("file_sha"):
            wanted.setdefault(name[len(start) :], here)
    if target.exists() or not wanted:
        return
    building = target.with_name(f".{run.run}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    for name, content in wanted.items():
        atomic_write(building / name, content)
    os.rename(building, target)
    fsync_dir(target.parent)
    files.append(f"wrote analysis/{run.run}/, {len(wanted)} files")


def _restore(
    program: Program, old: str, mine: Mapping[str, bytes], theirs: Mapping[str, bytes], files: list[str]
) -> None:
    """Undo, in the folder of the number's keeper, what the merge took from the other run.

    A file that is neither side's version is somebody's newer work and stays.
    """
    folder = program.analysis_dir(old)
    for name in sorted({*mine, *theirs}):
        here, right = _bytes(folder / name), theirs.get(name)
        foreign = here is None or here == mine.get(name) or _MARKER in here
        if here == right or not foreign:
            continue
        if right is not None:
            atomic_write(folder / name, right)
            files.append(f"restored analysis/{old}/{name}")
        elif here is not None:
            (folder / name).unlink()
            files.append(f"removed analysis/{old}/{name}, which is not {old}'s")


def _point_children(program: Program, state: State, run: RunState, old: str, files: list[str]) -> None:
    """Let the configs of a renumbered run's children name it by its new number."""
    for child in state.runs.values():
        keys = [key for key in ("parent", "replicate_of") if child.created.get(key) == run.run]
        path = program.config_path(child.run)
        text = _bytes(path) if keys else None
        if text is None:
            continue
        try:
            document = tomlkit.parse(text.decode())
        except ValueError:  # `verify` and `launch` say what is wrong with it
            continue
        stale = [key for key in keys if document.get(key) == old]
        for key in stale:
            document[key] = run.run
        if stale:
            atomic_write(path, tomlkit.dumps(document))
            files.append(f"changed {', '.join(stale)} in {program.relative(path)} to {run.run}")
