import os
import socket
import subprocess
import sys

import pytest

from optimum_neuronal.files import locking
from optimum_neuronal.files.locking import hold, let_go


pytestmark = pytest.mark.skipif(locking.fcntl is None, reason="the system has no such locks")

HOLDING = """
import sys
from pathlib import Path
from optimum_neuronal.files.locking import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_is_told_who_holds_it(tmp_path):
    file = tmp_path / "new" / ".lock"
    handle = hold(file)
    with pytest.raises(BlockingIOError, match=f"new is in use by process {os.getpid()} on {socket.gethostname()}"):
        hold(file)
    let_go(handle)
    let_go(hold(file))


def test_a_killed_process_leaves_no_stale_lock(tmp_path):
    file = tmp_path / ".lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError, match=f"process {process.pid} on"):
        hold(file)
    process.kill()
    process.communicate()
    let_go(hold(file))


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """Whoever waits at a removed file would hold nothing: the next would make another."""
    file, lock = tmp_path / ".lock", locking._lock

    def removed(handle):
        monkeypatch.setattr(locking, "_lock", lock)
        file.unlink()
        return lock(handle)

    monkeypatch.setattr(locking, "_lock", removed)
    handle = hold(file)
    assert os.fstat(handle).st_ino == file.stat().st_ino
    let_go(handle)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        hold(tmp_path / ".lock")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_disk_without_locks_stops_nobody(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locking.fcntl, "flock", refuse)
    assert hold(tmp_path / ".lock") is None
    let_go(None)
