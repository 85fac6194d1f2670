"""A disk that is full at one call, of all calls that write: the first, the second, and so on, each in a run of its own."""

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch


WRITING = (
    (builtins, "open"), (io, "open"), (os, "open"), (os, "mkdir"), (os, "rename"), (os, "replace"), (os, "fsync"),
    (safetensors.torch, "serialize_file"),
)  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by path; hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def writes(name: str, args: tuple, kwargs: dict) -> bool:
    """Return True if a call of a function may need room on the disk."""
    if name != "open":
        return True
    how = args[1] if len(args) > 1 else kwargs.get("mode", "r")
    return bool(how & (os.O_CREAT | os.O_TRUNC)) if isinstance(how, int) else any(letter in how for letter in "wxa+")


class FullDisk:
    """Lets one call that writes fail, of those that a piece of work makes in a folder.

    Args:
        number (`int`): of the call, from 1. 0: none fails.
    """

    def __init__(self, number: int):
        self.left = number

    def failing(self, owner, name: str) -> Callable:
        original = getattr(owner, name)

        def call(*args, **kwargs):
            if writes(name, args, kwargs):
                self.left -= 1
                if self.left == 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return None if name == "fsync" else original(*args, **kwargs)  # a full disk is no power cut

        return call

    def run(self, work: Callable[[], object]) -> OSError | None:
        """Do the work, and return the error that it raises."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in WRITING:
                patch.setattr(owner, name, self.failing(owner, name))
            try:
                work()
            except OSError as error:
                return error
        return None


def count_calls(work: Callable[[], object]) -> int:
    """Do the work, and return how many calls write."""
    disk = FullDisk(0)
    assert disk.run(work) is None
    return -disk.left
