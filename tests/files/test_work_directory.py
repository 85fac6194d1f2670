import os

import pytest

from optimum_neuronal.files.journal import IDENTITY, LOCK
from optimum_neuronal.files.work_directory import WorkDirectory


def used(path):
    """As a prune that was interrupted leaves it."""
    with WorkDirectory(path) as folder:
        folder.journal({"seed": 0}).put("step-01", 1)
    return path


def test_what_was_recorded_stays_until_it_is_removed(tmp_path):
    work = used(tmp_path / "new" / "work")
    with WorkDirectory(work) as folder:
        assert folder.journal({"seed": 0}).get("step-01") == (1, {})
        folder.remove()
    assert not work.exists()


def test_where_nothing_was_recorded_nothing_is_left(tmp_path):
    with pytest.raises(ZeroDivisionError), WorkDirectory(tmp_path / "work"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with WorkDirectory() as folder:
        assert not folder.journal({}).keeps
        folder.remove()


def test_the_second_is_told_who_uses_it(tmp_path):
    work = tmp_path / "work"
    told = f"work is in use by process {os.getpid()} on .*: wait for it to end"
    with WorkDirectory(work), pytest.raises(BlockingIOError, match=told):
        WorkDirectory(work).__enter__()
    with WorkDirectory(work):
        pass


def test_only_what_is_its_own_is_removed(tmp_path):
    work = used(tmp_path / "work")
    (work / "model").mkdir()
    for name in ("model/model.safetensors", "notes.txt", "model-00001.safetensors"):
        (work / name).write_text("mine")
    for name in (
        ".identity.json.0123abcd",
        ".step-01.record.safetensors.0123abcd",
        "step-02.record.safetensors.damaged",
    ):
        (work / name).write_text("left by a kill, or damaged")
    with WorkDirectory(work) as folder:
        folder.remove()
    assert sorted(os.listdir(work)) == ["model", "model-00001.safetensors", "notes.txt"]
    assert (work / "model" / "model.safetensors").read_text() == "mine"


def test_a_link_and_the_working_directory_stay(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with WorkDirectory(used(tmp_path / "link")) as folder:
        folder.remove()
    assert (tmp_path / "link").is_symlink() and not os.listdir(tmp_path / "target")
    monkeypatch.chdir(tmp_path / "target")
    with WorkDirectory(used(".")) as folder:
        folder.remove()
    assert not os.listdir(tmp_path / "target")


def test_what_cannot_be_removed_is_warned_of(tmp_path, monkeypatch):
    """The model is saved by then."""
    said, work = [], used(tmp_path / "work")
    monkeypatch.setattr("optimum_neuronal.files.work_directory.logger.warning", said.append)

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    with WorkDirectory(work) as folder, monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        patch.setattr(os, "rmdir", refuse)
        folder.remove()
    assert len(said) == 1 and "could not be removed: " in said[0]
    assert {IDENTITY, LOCK} <= set(os.listdir(work))


def test_a_work_directory_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="Cannot record in .*file is a file"):
        WorkDirectory(tmp_path / "file")
    with pytest.raises(ValueError, match="Cannot record in '': the name is empty"):
        WorkDirectory("")
