"""A kill at any step, an error, and a full disk leave old files, new ones, or a directory that is visibly not a model."""

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from optimum_neuronal.files import atomic
from optimum_neuronal.files.atomic import MOVES, finish_moves, replaced_directory, scratch_directory, write_atomically


TOUCHING = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
OWN = {"notes.txt": "mine", "runs/1/log": "mine"}
OLD = {"config.json": "old", "model.safetensors": "old", "more.safetensors": "old", **OWN}
NEW = {"config.json": "new", "model.safetensors": "new", "README.md": "new", "runs/2/log": "new", **OWN}


def write(directory: Path, text: str) -> None:
    with replaced_directory(directory, ["*.safetensors"], last="config.json") as staging:
        for name in (OLD if text == "old" else NEW).keys() - OWN.keys():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_text(text)


def make(directory: Path) -> None:
    write(directory, "old")
    (directory / "runs" / "1").mkdir(parents=True)
    for name, text in OWN.items():
        (directory / name).write_text(text)


def content(directory: Path) -> dict[str, str]:
    files = [file for file in directory.rglob("*") if file.is_file() and ".saving" not in str(file)]
    return {str(file.relative_to(directory)): file.read_text() for file in files}


def killed_at(step: int, work) -> bool:
    """Run `work` in a fork, killed before its step-th call that touches a file. Return False if it ended before."""
    child = os.fork()
    if child == 0:
        left = step

        def hook(event, _):
            nonlocal left
            if event not in TOUCHING:
                return
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
@pytest.mark.parametrize("exists", [False, True])
def test_a_kill_at_any_step(tmp_path, exists):
    directory, outcomes, step = tmp_path / "parent" / "model", [], 0
    while True:
        if exists:
            make(directory)
        step += 1
        killed = killed_at(step, lambda: write(directory, "new"))
        found = content(directory)
        assert "config.json" not in found or found in (OLD, {**OLD, **NEW}, NEW, dict(NEW.items() - OWN.items()))
        if exists and "config.json" in found:
            assert found["config.json"] == found["model.safetensors"] and found.items() >= OWN.items()
        outcomes.append(found.get("config.json"))
        write(directory, "new")
        assert os.listdir(directory.parent) == [directory.name], "nothing of the killed process is left"
        assert ".saving" not in os.listdir(directory)
        shutil.rmtree(directory)
        if not killed:
            break
    assert step > 8 and outcomes[-1] == "new" and outcomes[0] == ("old" if exists else None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
def test_a_save_that_was_killed_while_files_moved_is_completed(tmp_path):
    """Wherever it was killed, and wherever the completion is killed too. The next save deletes no only copy."""
    directory, step, completed = tmp_path / "model", 0, 0
    killed = True
    while killed:
        step, again = step + 1, 0
        make(directory)
        killed = killed_at(step, lambda: write(directory, "new"))
        moving = (directory / ".saving" / MOVES).exists()
        while moving and killed_at(again := again + 1, lambda: finish_moves(directory)):
            completed += 1
            assert content(directory) == NEW or (directory / ".saving" / MOVES).exists()
        with pytest.raises(ZeroDivisionError), replaced_directory(directory, [], "config.json"):
            raise ZeroDivisionError
        assert content(directory) in ((NEW,) if moving else (OLD, NEW))
        assert ".saving" not in os.listdir(directory)
        shutil.rmtree(directory)
    assert completed > 30


def interrupted(directory: Path, monkeypatch) -> None:
    """A save that was killed after its first move."""
    make(directory)
    move = atomic._move

    def stop(moves):
        if moves[0][0] == directory / "config.json":  # not when the old files would come back
            move(moves[:1])
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(atomic, "_move", stop)
        write(directory, "new")


def test_the_completion_of_a_save_is_told(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(atomic.logger, "warning", messages.append)
    interrupted(tmp_path / "model", monkeypatch)
    for _ in range(2):
        finish_moves(tmp_path / "model")
    assert content(tmp_path / "model") == NEW
    assert len(messages) == 1 and "model was interrupted while its files were moved. It is completed" in messages[0]


def test_what_was_written_after_an_interrupted_save_stays(tmp_path, monkeypatch):
    interrupted(tmp_path / "model", monkeypatch)
    (tmp_path / "model" / "config.json").write_text("another tool's")
    for save in (finish_moves, lambda directory: write(directory, "new")):
        with pytest.raises(FileExistsError, match="config.json was written since.*keep what you need"):
            save(tmp_path / "model")
        assert (tmp_path / "model" / "config.json").read_text() == "another tool's"
        assert (tmp_path / "model" / ".saving" / ".replaced" / "config.json").read_text() == "old"


@pytest.mark.parametrize("name", ["../outside/file", "{}/outside/file", "link/file", ".."])
@pytest.mark.parametrize("part", ["old", "new"])
def test_moves_that_a_folder_came_with_stay_inside_it(name, part, tmp_path):
    """A cloned folder may hold anything."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("mine")
    staging = tmp_path / "model" / ".saving"
    staging.mkdir(parents=True)
    (staging / "file").write_text("theirs")
    (tmp_path / "model" / "link").symlink_to(tmp_path / "outside")
    names = {"old": [], "new": []} | {part: [name.format(tmp_path)]}
    (staging / MOVES).write_text(json.dumps(names))
    with pytest.raises(ValueError, match="which is not in .*model: delete"):
        finish_moves(tmp_path / "model")
    assert (tmp_path / "outside" / "file").read_text() == "mine"
    (staging / MOVES).write_text("[" * 10**6)
    with pytest.raises(ValueError, match="moves.json is damaged: keep what you need"):
        finish_moves(tmp_path / "model")


def test_an_exception_leaves_everything(tmp_path):
    make(tmp_path / "model")
    with pytest.raises(RuntimeError), replaced_directory(tmp_path / "model", [], "config.json") as staging:
        (staging / "config.json").write_text("new")
        with pytest.raises(BlockingIOError, match="Another process or thread is saving to .*model"):
            write(tmp_path / "model", "new")
        raise RuntimeError("stop")
    assert content(tmp_path / "model") == OLD and os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "not permitted"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_moved_brings_the_old_ones_back(error, tmp_path, monkeypatch):
    """So does Ctrl-C while files are moved."""
    make(tmp_path / "model")
    moves, failing, replace = 0, 1, os.replace

    def move(*paths):
        nonlocal moves
        moves += 1
        if moves == failing:
            raise error
        replace(*paths)

    monkeypatch.setattr(os, "replace", move)
    while content(tmp_path / "model") == OLD:
        moves = 0
        try:
            write(tmp_path / "model", "new")
        except type(error):
            assert content(tmp_path / "model") == OLD and ".saving" not in os.listdir(tmp_path / "model")
        failing += 1
    assert content(tmp_path / "model") == NEW and failing > 6


def test_a_folder_in_the_way_of_a_file_stays(tmp_path):
    make(tmp_path / "model")
    (tmp_path / "model" / "README.md").mkdir()
    with pytest.raises(IsADirectoryError, match="README.md"):
        write(tmp_path / "model", "new")
    assert content(tmp_path / "model") == OLD


def test_users_files_and_folders_stay_and_links_are_followed(tmp_path):
    make(tmp_path / "model")
    (tmp_path / "model" / "mine.safetensors").mkdir()  # named as old weights are
    (tmp_path / "model" / "mine.safetensors" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "model") == {**NEW, "mine.safetensors/notes.txt": "mine"}


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


@pytest.mark.parametrize("exists", [False, True])
def test_files_have_the_mode_of_any_new_file(tmp_path, exists):
    """safetensors writes files that only their user can read."""
    if exists:
        make(tmp_path / "model")
    with replaced_directory(tmp_path / "model", [], "config.json") as staging:
        (staging / "folder").mkdir()
        for name in ("config.json", "folder/weights"):
            (staging / name).touch(0o600)
    (tmp_path / "mine").touch()
    for name in ("config.json", "folder/weights"):
        assert (tmp_path / "model" / name).stat().st_mode == (tmp_path / "mine").stat().st_mode, name


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
