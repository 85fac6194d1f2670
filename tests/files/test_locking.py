import errno
import os
import socket
import subprocess
import sys

import filelock
import pytest

from optimum_neuronal.files.locking import acquired


HOLDING = """
import sys
from pathlib import Path
from optimum_neuronal.files.locking import acquired
lock = acquired(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_is_told_who_holds_it(tmp_path):
    file = tmp_path / "new" / ".lock"
    lock = acquired(file)
    with pytest.raises(BlockingIOError, match=f"new is in use by process {os.getpid()} on {socket.gethostname()}"):
        acquired(file)
    lock.release()
    acquired(file).release()


def test_a_killed_process_leaves_no_stale_lock(tmp_path):
    file = tmp_path / ".lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError, match=f"process {process.pid} on"):
        acquired(file)
    process.kill()
    process.communicate()
    acquired(file).release()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        acquired(tmp_path / ".lock")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_disk_without_locks_stops_nobody(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "_acquire", refuse)
    acquired(tmp_path / ".lock").release()
