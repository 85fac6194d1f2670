"""A new directory appears whole, by one rename; what lies at its path, or appears there meanwhile, is not lost."""

import errno
import os
import signal
import sys
from functools import partial
from unittest.mock import Mock

import pytest
from obstacles import MODEL, OBSTACLES, fill, state
from safetensors import SafetensorError

from optimum_neuronal.files.output import Output, check_output, new_directory, write_atomically


NEW = {"config.json": "new", "model.safetensors": "new", "code/model.py": "new"}
TOUCHING = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


def write(output):
    with new_directory(output) as folder:
        fill(folder, NEW)


def content(directory):
    return {str(file.relative_to(directory)): file.read_text() for file in directory.rglob("*") if file.is_file()}


SAID = {
    "file": "model is a file. Choose another directory",
    "directory": "model holds 1 file, and is not a model's directory: choose a new directory.",
    "model": r"model holds 3 files of a model: .* or pass --overwrite \(overwrite=True\) to replace it with all",
    "link": "model is a link: choose a new directory",
    "dangling link": "model is a link: choose a new directory",
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_lies_there_is_said_and_stays(kind, tmp_path):
    OBSTACLES[kind](tmp_path / "model")
    before = state(tmp_path)
    for overwrite in (False, True)[: 1 if kind == "model" else 2]:
        with pytest.raises((FileExistsError, NotADirectoryError), match=SAID[kind]):
            check_output(tmp_path / "model", overwrite)
    assert state(tmp_path) == before


@pytest.mark.parametrize("kind", OBSTACLES)
@pytest.mark.parametrize("replaces", [False, True])
def test_what_appears_meanwhile_stays_and_the_result_waits(kind, replaces, tmp_path):
    """Also in the place of the model that was to be replaced."""
    path = tmp_path / "model"
    if replaces:
        fill(path)
    output, said = check_output(path, overwrite=True), "model was not written .*The complete result is in"
    with pytest.raises(FileExistsError, match=said) as error, new_directory(output) as folder:
        fill(folder, NEW)
        if replaces:
            path.rename(tmp_path / "moved")
        OBSTACLES[kind](path)
        before = state(path)
    waiting = tmp_path / str(error.value).rstrip(".").rpartition(os.sep)[2]
    assert content(waiting) == NEW and state(path) == before
    assert {entry.name for entry in tmp_path.iterdir()} - {"elsewhere", "moved"} == {"model", waiting.name}


def test_a_file_that_appears_deep_in_the_replaced_directory(tmp_path):
    fill(tmp_path / "model")
    output = check_output(tmp_path / "model", overwrite=True)
    with pytest.raises(FileExistsError, match="something else is there now"), new_directory(output):
        (tmp_path / "model" / "runs" / "new").write_text("mine")
    assert content(tmp_path / "model") == {**MODEL, "runs/new": "mine"}


def test_what_is_never_replaced(tmp_path, monkeypatch):
    fill(model := tmp_path / "model")
    check = partial(check_output, model, overwrite=True)
    (tmp_path / "link").symlink_to(model)
    for kept in ("model", "link", "model/../model", "model/model.safetensors", "link/runs"):
        with pytest.raises(FileExistsError, match="model holds .*, which is read: choose a new directory"):
            check(kept=[None, "me/llama", tmp_path / kept])
    for place in (model, model / "runs"):
        monkeypatch.chdir(place)
        with pytest.raises(FileExistsError, match="holds the working directory"):
            check()
    monkeypatch.chdir(tmp_path)
    (model / "runs" / ".git").mkdir()
    with pytest.raises(FileExistsError, match="holds a git repository"):
        check()
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(FileExistsError, match="is a mount point, which cannot be renamed"):
        check_output(tmp_path / "empty")
    assert content(model) == MODEL


def test_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_output("new/model").path == tmp_path / "new" / "model" and not list(tmp_path.iterdir())


def test_a_model_is_replaced_with_all_that_is_in_it(tmp_path):
    """A new file's mode is not that of safetensors, which only its user can read."""
    (tmp_path / "model").mkdir()
    for _ in range(2):
        output = check_output(tmp_path / "model", overwrite=True)
        with new_directory(output) as folder:
            fill(folder, NEW)
            (folder / "config.json").chmod(0o600)
        assert content(tmp_path / "model") == NEW and os.listdir(tmp_path) == ["model"]
    os.umask(umask := os.umask(0))
    for path, mode in ((tmp_path / "model", 0o777), (tmp_path / "model" / "config.json", 0o666)):
        assert path.stat().st_mode & 0o777 == mode & ~umask


def killed_at(step, work):
    """Run `work` in a fork, killed before its step-th call that touches a file. Return False if it ended before."""
    child = os.fork()
    if child == 0:
        left = step

        def hook(event, _):
            nonlocal left
            if event in TOUCHING:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_at_any_step_leaves_the_old_model_or_the_new_one(replaces, tmp_path):
    """Or nothing, with both beside it. A next save is told so, or removes what is left."""
    found, killed, step = [], True, 0
    while killed:
        step += 1
        path = tmp_path / str(step) / "model"
        if replaces:
            fill(path)
        output = check_output(path, replaces)
        killed = killed_at(step, lambda output=output: write(output))
        found.append(content(path) if path.exists() else None)
        old = path.with_name(".model.replaced")
        if found[-1] is None and old.exists():
            assert content(old) == MODEL and content(path.with_name(".model.saving")) == NEW
        if old.exists():
            with pytest.raises(FileExistsError, match="was killed while it replaced a model, which is in .*replaced"):
                check_output(path, replaces)
        else:
            write(check_output(path, overwrite=True))
            assert os.listdir(path.parent) == ["model"]
    assert step > 8 and found[-1] == NEW and all(one in ((MODEL if replaces else None), None, NEW) for one in found)
    assert not replaces or {None, *(one["config.json"] for one in found if one)} == {None, "new", MODEL["config.json"]}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")])  # fmt: skip
@pytest.mark.parametrize("replaces", [False, True])
def test_a_full_disk_changes_nothing(error, replaces, tmp_path):
    if replaces:
        fill(tmp_path / "model")
    before, output = state(tmp_path)[1:], check_output(tmp_path / "model", replaces)
    said = "Saving to .*model failed, and nothing was changed there: .*No space left on device"
    with pytest.raises(OSError, match=said), new_directory(output) as folder:
        fill(folder, NEW)
        raise error
    assert state(tmp_path)[1:] == before


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "not permitted"), KeyboardInterrupt()])
def test_a_rename_that_fails_brings_the_old_model_back(error, failing, tmp_path, monkeypatch):
    fill(tmp_path / "model")
    output, rename, calls = check_output(tmp_path / "model", overwrite=True), os.rename, []

    def fail(*paths):
        calls.append(paths)
        if len(calls) == failing:
            raise error
        rename(*paths)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises((FileExistsError, KeyboardInterrupt)):
        write(output)
    assert content(tmp_path / "model") == MODEL and not (tmp_path / ".model.replaced").exists()
    waiting = [path for path in tmp_path.iterdir() if path.name != "model"]
    assert [content(path) for path in waiting] == ([] if isinstance(error, KeyboardInterrupt) else [NEW])


def test_only_one_saves_at_a_time(tmp_path):
    output = Output(tmp_path / "model")
    with new_directory(output) as folder:
        fill(folder, NEW)
        with pytest.raises(BlockingIOError, match="Another process or thread is saving to .*model"):
            write(output)
    assert content(tmp_path / "model") == NEW and os.listdir(tmp_path) == ["model"]
    with pytest.raises(FileExistsError, match="The complete result is in"):
        write(output)  # which was checked before the first one ended


@pytest.mark.parametrize("kind", OBSTACLES)
def test_a_new_file_replaces_nothing(kind, tmp_path):
    OBSTACLES[kind](tmp_path / "model")
    before = content(tmp_path)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "model", b"new", is_new=True)
    write_atomically(tmp_path / "other", b"new", is_new=True)
    assert content(tmp_path) == {**before, "other": "new"}


def test_a_file_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    """Though several processes write it, or the disk is full."""
    path, replace = tmp_path / "file", os.replace

    def after_another_has_written(source, target):
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_atomically(path, b"other")
        replace(source, target)

    monkeypatch.setattr(os, "replace", after_another_has_written)
    write_atomically(path, b"own")
    assert path.read_bytes() == b"own" and os.listdir(tmp_path) == ["file"]

    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=f"No space left on device: '{path}'$"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"own" and os.listdir(tmp_path) == ["file"]
