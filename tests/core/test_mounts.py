"""Which file systems are another machine's, and how each system lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core import mounts
from harness.ledger import Ledger, disk, index

LINUX = """/dev/vda / ext4 rw,relatime 0 0
server:/export /mnt/my\\040data nfs4 rw 0 0
tmpfs /mnt/my\\040data/local tmpfs rw 0 0
host /home/ada/remote fuse.sshfs rw 0 0
broken line
"""
MACOS = """/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
//ada@server/data on /Volumes/my (old) data (smbfs, nodev, nosuid, mounted by ada)
map auto_home on /System/Volumes/Data/home (autofs, automounted, nobrowse)
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home", "ext4"),
        ("/mnt/my data", "nfs4"),
        ("/mnt/my data/program", "nfs4"),
        ("/mnt/my data/local/program", "tmpfs"),
        ("/mnt/my database", "ext4"),
        ("/home/ada/remote/x", "fuse.sshfs"),
    ],
)
def test_the_innermost_mount_counts(folder, kind) -> None:
    assert mounts.kind_of(Path(folder), mounts.linux_mounts(LINUX)) == kind


def test_a_later_mount_on_one_place_hides_the_earlier_one() -> None:
    both = [(Path("/a"), "ext4"), (Path("/a"), "nfs")]
    assert mounts.kind_of(Path("/a/b"), both) == "nfs"
    assert mounts.kind_of(Path("/b"), both) is None


def test_macos_lists_its_mounts_in_its_own_way() -> None:
    found = mounts.macos_mounts(MACOS)
    assert mounts.kind_of(Path("/Volumes/my (old) data/x"), found) == "smbfs"
    assert mounts.kind_of(Path("/Users/ada"), found) == "apfs"


def test_without_proc_the_mount_command_is_asked(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "absent")
    monkeypatch.setattr(mounts, "_mount_output", lambda: f"server:/x on {tmp_path} (nfs, nodev)\n")
    assert mounts.file_system(tmp_path / "program") == "nfs"
    monkeypatch.setattr(mounts, "_mount_output", lambda: "")
    assert mounts.file_system(tmp_path) is None


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smbfs", "SMB3", "9p", "lustre", "fuse.sshfs", "fuse.unheard"])
def test_network_file_systems(kind) -> None:
    assert mounts.is_network(kind)


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "apfs", "tmpfs", "overlay", "zfs", "fuseblk", "fuse.mergerfs"]
)
def test_local_file_systems(kind) -> None:
    assert not mounts.is_network(kind)


def test_a_ledger_says_once_what_to_expect_of_a_network_file_system(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(disk, "file_system", lambda folder: "nfs4")
    monkeypatch.setenv("HARNESS_ACTOR", "agent:tester")
    ledger = Ledger(tmp_path / "runs.jsonl")
    ledger.append("run-001", "created", {})
    ledger.append("run-001", "noted", {})
    ledger.events()
    assert len(ledger.warnings) == 1
    assert all(word in ledger.warnings[0] for word in ("nfs4", "two machines", "verify", "local disk"))
    assert index.read_state(tmp_path / "runs.jsonl").warnings == ledger.warnings
    monkeypatch.setattr(disk, "file_system", lambda folder: "ext4")
    assert index.read_state(tmp_path / "runs.jsonl").warnings == []
