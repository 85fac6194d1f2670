"""Kills a process that replaces a directory's files before every single step that touches a file.

Run as a script, in a process without torch: forking a small process takes a hundredth of the time.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from optimum_neuronal.files import atomic


TOUCHING = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "shutil.rmtree")
CHECKPOINT = ("config.json", "model.safetensors", "report.json")
OWN = {"notes.txt": "mine", "runs/1/log": "mine"}
OLD = {**dict.fromkeys(CHECKPOINT, "old"), **OWN}
NEW = {**dict.fromkeys((*CHECKPOINT, "model-2.safetensors"), "new"), **OWN}


def of_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def write(directory: Path, text: str) -> None:
    with atomic.replaced_directory(directory, of_weights, last="config.json") as staging:
        for name in (*CHECKPOINT, *(["model-2.safetensors"] if text == "new" else [])):
            (staging / name).write_text(text)


def make(directory: Path) -> None:
    """An old checkpoint with a user's own files."""
    write(directory, "old")
    (directory / "notes.txt").write_text("mine")
    (directory / "runs" / "1").mkdir(parents=True)
    (directory / "runs" / "1" / "log").write_text("mine")


def content(directory: Path) -> dict[str, str]:
    files = [file for file in directory.rglob("*") if file.is_file() and ".saving-" not in str(file)]
    return {str(file.relative_to(directory)): file.read_text() for file in files}


def in_child(work, kill=None) -> int:
    """Runs it in a fork; `kill(process id)` may kill it. Returns how it ended: 0, or minus a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    if kill is not None:
        kill(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(step: int, work) -> bool:
    """Runs it in a fork, killed before it touches a file for the so-manieth time. False if it ended before."""

    def run():
        left = step

        def hook(event, _):
            nonlocal left
            if event in TOUCHING:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    return in_child(run) == -signal.SIGKILL


def left_in_staging(directory: Path) -> dict[str, str]:
    """The files in a staging folder, inside of the directory or beside it."""
    folders = [*directory.glob(".saving-*/files"), *directory.parent.glob(".saving-*/files")]
    return {file.name: file.read_text() for folder in folders for file in folder.iterdir()}


def main(way: str, directory: Path) -> None:
    """Old or new, and whole; or without config.json, and then the rest of the new files is whole beside the moved ones."""
    os.fsync = lambda handle: None  # a kill is no power cut
    start, first = (make, OLD) if way == "replaced" else (lambda directory: None, {})
    start(directory)
    new = NEW if way == "replaced" else dict.fromkeys(NEW.keys() - OWN.keys(), "new")
    step, seen, broken = 1, [], 0
    while killed_at(step, lambda: write(directory, "new")):
        found = content(directory)
        if way == "replaced" and "config.json" not in found:
            broken += 1
            assert found.items() >= OWN.items() and {**found, **left_in_staging(directory)}.items() >= NEW.items()
        else:
            assert found in (first, new), (step, found)
            seen.append(found)
        write(directory, "old")  # cleans
        if way == "replaced":
            assert content(directory) == OLD and len(os.listdir(directory)) == 5
        assert os.listdir(directory.parent) == [directory.name]
        if way != "replaced":
            shutil.rmtree(directory)
        step += 1
    assert content(directory) == new
    assert first in seen and new in seen and (broken == 0) == (way == "new"), (len(seen), broken)
    sys.stdout.write(f"{step - 1} kills, {broken} left no model\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
