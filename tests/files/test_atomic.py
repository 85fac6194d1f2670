import errno
import os

import pytest

from optimum_neuronal.files.atomic import scratch_directory, write_atomically


def test_a_full_disk_leaves_a_file_as_it_was(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'file'}'$"):
        write_atomically(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_a_scratch_directory_begins_empty_and_is_gone_at_the_end(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "left").write_text("by a killed process")
    with pytest.raises(ZeroDivisionError), scratch_directory(tmp_path, "work") as directory:
        assert not list(directory.iterdir())
        (directory / "file").write_text("large")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_two_processes_write_the_same_file(tmp_path, monkeypatch):
    path, replace = tmp_path / "file", os.replace

    def replace_after_another_has_written(source, target):
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_atomically(path, b"other")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_after_another_has_written)
    write_atomically(path, b"own")
    assert path.read_bytes() == b"own" and os.listdir(tmp_path) == ["file"]
