import errno
import os
import signal
import socket
import time

import filelock
import pytest
from killed_saves import in_child

from optimum_neuronal.files.records import acquired


def test_the_second_is_told_who_holds_it(tmp_path):
    file = tmp_path / "new" / ".lock"
    lock = acquired(file)
    with pytest.raises(BlockingIOError, match=f"new is in use by process {os.getpid()} on {socket.gethostname()}"):
        acquired(file)
    lock.release()
    acquired(file).release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a process that it forks")
def test_a_killed_process_leaves_no_stale_lock(tmp_path):
    file, (held, holding) = tmp_path / ".lock", os.pipe()

    def hold():
        lock = acquired(file)
        os.write(holding, b"held")
        time.sleep(60)
        lock.release()

    def kill(child):
        assert os.read(held, 4) == b"held"
        with pytest.raises(BlockingIOError, match=f"process {child} on"):
            acquired(file)
        os.kill(child, signal.SIGKILL)

    assert in_child(hold, kill) == -signal.SIGKILL
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
    lock = acquired(tmp_path / ".lock")
    assert not lock.is_locked
