"""Replacing a file: whole or not at all, in its own folder, with its own mode, through a link."""

import os
import stat

import pytest

from harness.core.errors import BusyError, InfraError
from harness.core.files import atomic_write, file_lock


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "page.md"
    target.write_text("old")
    link = tmp_path / "page.md"
    link.symlink_to(target)
    atomic_write(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["page.md", "real"] and os.listdir(target.parent) == ["page.md"]


def test_the_mode_of_a_file_is_kept(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(0o640)
    atomic_write(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_temporary_file_stands_beside_the_target(tmp_path, monkeypatch):
    """A rename from another file system would be a copy, which a crash can cut."""
    renamed = []
    real = os.replace

    def replace(source, target):
        renamed.append((os.path.dirname(source), os.path.dirname(target)))
        real(source, target)

    monkeypatch.setattr("pathlib.Path.replace", lambda self, to: replace(self, to))
    atomic_write(tmp_path / "deep" / "x", b"new")
    assert renamed == [(str(tmp_path / "deep"), str(tmp_path / "deep"))]


def test_a_folder_or_a_device_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", "/dev/null"):
        with pytest.raises(InfraError, match="no regular file"):
            atomic_write(tmp_path / path, "x")


def test_who_waits_for_a_lock_is_told_once(tmp_path):
    told: list[int] = []
    with (
        file_lock(tmp_path / "lock"),
        pytest.raises(BusyError),
        file_lock(tmp_path / "lock", wait_s=0.05, on_wait=lambda: told.append(1)),
    ):
        pass
    with file_lock(tmp_path / "lock", on_wait=lambda: told.append(2)):
        assert told == [1]


def test_a_lock_is_waited_for_only_so_long_and_freed_with_its_holder(tmp_path):
    with file_lock(tmp_path / "lock"), pytest.raises(BusyError), file_lock(tmp_path / "lock", wait_s=0):
        pass
    with file_lock(tmp_path / "lock", wait_s=0):
        pass
