"""Power loss at any point: what was not synced may be gone, whole or in part, and nothing acknowledged is.

Every write, sync, truncation and rename is recorded as it happens. After each of them the machine may stop, and the
disk then holds for every file the bytes of its last sync, those and a part of what came since, or all; and in every
folder the names of its last sync, or all. (The model of ALICE, Pillai et al., OSDI 2014, but writes of one file keep
their order.)
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from harness.core import files
from harness.core.files import atomic_write
from harness.ledger import Ledger
from harness.ledger.verify import verify
from tests.ledger.test_ledger_sweeps import work

WATCHED = ("write", "fsync", "ftruncate", "replace")
Image = tuple[tuple[tuple[str, bytes], ...], int]
"""Files by name with their bytes, and how many events had been acknowledged."""


class Disk:
    """Watches one folder (not those below it) and collects every image that a power loss could leave."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        self.acknowledged: list[str] = []
        self.synced: dict[int, bytes] = {path.stat().st_ino: path.read_bytes() for path in self.present().values()}
        self.names: dict[str, int] = {name: path.stat().st_ino for name, path in self.present().items()}
        self.images: set[Image] = set()
        self.calls: list[str] = []
        for name in WATCHED:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def present(self) -> dict[str, Path]:
        return {path.name: path for path in self.folder.iterdir() if path.is_file()}

    def wrap(self, name, real):
        def call(*arguments, **keywords):
            self.calls.append(name)
            self.stop_here()  # before the call, and after it
            result = real(*arguments, **keywords)
            if name == "fsync":
                self.note_sync(arguments[0])
            self.stop_here()
            return result

        return call

    def note_sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            if found.st_ino == self.folder.stat().st_ino:
                self.names = {name: path.stat().st_ino for name, path in self.present().items()}
            return
        for path in self.present().values():
            if path.stat().st_ino == found.st_ino:
                self.synced[found.st_ino] = path.read_bytes()

    def stop_here(self) -> None:
        current = {name: (path.stat().st_ino, path.read_bytes()) for name, path in self.present().items()}
        by_inode = dict(current.values())
        # a file that was renamed over is still there under its durable name
        everything = {name: inode for name, (inode, _) in current.items()}
        for names in (self.names, everything):
            for share in (0.0, 0.5, 1.0):
                held = {name: self.bytes_of(inode, by_inode.get(inode), share) for name, inode in names.items()}
                self.images.add((tuple(sorted(held.items())), len(self.acknowledged)))

    def bytes_of(self, inode: int, now: bytes | None, share: float) -> bytes:
        safe = self.synced.get(inode, b"")
        if now is None or share == 0.0:
            return safe
        if not now.startswith(safe):  # truncated since: either length may be on the disk
            return now
        return safe + now[len(safe) : len(safe) + int(share * (len(now) - len(safe)))]


def test_power_loss_anywhere_keeps_every_acknowledged_event(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    with monkeypatch.context() as patched:
        disk = Disk(folder, patched)
        work(folder / "runs.jsonl", disk.acknowledged)
        disk.stop_here()
    assert len(disk.acknowledged) == 5 and {"write", "fsync", "ftruncate"} <= set(disk.calls)
    assert len(disk.images) > 12
    for number, (held, acknowledged) in enumerate(sorted(disk.images, key=lambda image: image[1])):
        path = tmp_path / f"{number}" / "runs.jsonl"
        path.parent.mkdir()
        for name, data in held:
            (path.parent / name).write_bytes(data)
        ledger = Ledger(path)  # as the machine finds it when it comes back
        present = [event.id for event in ledger.events()]
        assert present[:acknowledged] == disk.acknowledged[:acknowledged], held
        assert set(present) <= set(disk.acknowledged), held
        added = ledger.append("run-001" if present else "program", "noted", {"text": "goes on"})
        assert [event.id for event in Ledger(path).events()] == [*present, added.id]
        assert verify(path) == []


def test_the_model_finds_an_append_that_forgets_to_sync(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    with monkeypatch.context() as patched:
        disk = Disk(folder, patched)
        patched.setattr(disk, "note_sync", lambda descriptor: None)  # a disk that confirms and keeps nothing
        disk.acknowledged.append(Ledger(folder / "runs.jsonl").append("program", "noted", {"text": "x"}).id)
        disk.stop_here()
    assert any(acknowledged and not dict(held).get("runs.jsonl") for held, acknowledged in disk.images)


def test_power_loss_anywhere_leaves_a_page_old_or_new(tmp_path, monkeypatch) -> None:
    (tmp_path / "page.md").write_bytes(b"old and long")
    with monkeypatch.context() as patched:
        patched.setattr(files.Path, "replace", lambda self, to: os.replace(self, to))
        disk = Disk(tmp_path, patched)
        atomic_write(tmp_path / "page.md", b"new")
        disk.stop_here()
    assert disk.calls == ["fsync", "replace", "fsync"]
    assert {dict(held)["page.md"] for held, _ in disk.images} == {b"old and long", b"new"}
