import os

import pytest

from optimum_neuronal.files.atomic import tree_to_disk, write_durably


@pytest.fixture
def synced(monkeypatch):
    """Inodes of what was brought to the disk, in order."""
    found, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (found.append(os.fstat(handle).st_ino), sync(handle)))
    return found


def test_a_file_and_its_name_are_brought_to_the_disk(tmp_path, synced):
    write_durably(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert synced == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_all_of_a_directory_is_brought_to_the_disk(tmp_path, synced):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"one")
    (tmp_path / "file").write_bytes(b"two")
    tree_to_disk(tmp_path)
    assert sorted(synced) == sorted(path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")])
