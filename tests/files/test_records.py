import json
import os
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save

from optimum_neuronal.common.processes import Processes
from optimum_neuronal.files import records as module
from optimum_neuronal.files.records import IDENTITY, LOCK, SUFFIX, Records, remove_records, work_directory


def test_findings_are_found_again(tmp_path):
    written = Records(tmp_path / "new" / "work", {"sparsity": 0.7, "targets": None})
    tensors = {"a.b": torch.arange(6).view(2, 3).T, "bits": torch.tensor([1, 255], dtype=torch.uint8)}
    written.put("step-01", [0.1 + 0.2, float("inf")], tensors)
    value, found = Records(tmp_path / "new" / "work", {"targets": None, "sparsity": 0.7}).get("step-01")
    assert value == [0.1 + 0.2, float("inf")], "to the bit"
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in tensors.items())
    assert written.get("step-02") is None


def test_a_finding_is_made_once_and_is_the_first_processs(tmp_path, monkeypatch):
    first, second = Records(tmp_path), Records(tmp_path)
    assert first.recorded("step-01", lambda: ("made", {})) == first.get("step-01") == ("made", {})
    assert second.recorded("step-01", lambda: pytest.fail("made again")) == ("made", {})
    assert (first.resumed, second.resumed) == (False, True), "its own record is not an earlier run's"
    monkeypatch.setattr(Processes, "from_first", lambda self, value: value is None and ("the first one's", {}))
    other = Records(processes=Processes(rank=1, count=2))
    assert other.recorded("step-02", lambda: pytest.fail("made"))[0] == "the first one's"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sparsity": 0.6, "model": "xyz"}, "model was 'abc', is 'xyz'; sparsity was 0.7, is 0.6. Use"),
        ({"topup_args": {"steps": "block"}}, "topup_args was {'seed': 1, .*}, is {'steps': 'block'}"),
        ({"format": 2}, "format was None, is 2"),
        ({"seed": None}, "seed was 0, is None"),
        ({f"p{i}": i for i in range(9)}, "p0 was None, is 0; p1 .*; p2 was None, is 2; and 6 more"),
    ],
)
def test_a_directory_of_another_run(changed, message, tmp_path):
    """A setting that is new or gone counts too."""
    before = {"sparsity": 0.7, "model": "abc", "seed": 0, "topup_args": {"seed": 1, "steps": "block"}}
    Records(tmp_path, before)
    now = {name: value for name, value in {**before, **changed}.items() if value is not None}
    with pytest.raises(ValueError, match=f"started with different settings: {message}"):
        Records(tmp_path, now)


@pytest.mark.parametrize("content", [b"", b"cut short", save({"x": torch.ones(1)})])
def test_what_cannot_be_read_raises(content, tmp_path):
    records = Records(tmp_path)
    (tmp_path / f"step-01{SUFFIX}").write_bytes(content)
    with pytest.raises(ValueError, match=f"step-01.* is damaged: delete {tmp_path} to start again"):
        records.get("step-01")
    for identity in (b"", b"{", b"null", b"[1]", b"\xff"):
        (tmp_path / IDENTITY).write_bytes(identity)
        with pytest.raises(ValueError, match="identity.json is damaged: delete"):
            Records(tmp_path)


def test_a_full_disk_loses_records_and_stops_nobody(tmp_path, monkeypatch):
    records, warned = Records(tmp_path, {}), []
    monkeypatch.setattr(module.logger, "warning_once", warned.append)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
        records.put("step-01", 1, {})
    assert os.listdir(tmp_path) == [IDENTITY], "no temporary file is left"
    assert len(warned) == 1 and "No space left on device" in warned[0]
    records.put("step-03", 3, {})
    assert records.get("step-01") is None and records.get("step-03") == (3, {})


def record(path, **identity):
    """Record a step in a directory as an interrupted run does."""
    with work_directory(path) as folder:
        Records(folder, identity).put("step-01", 1, {})


def test_records_stay_until_the_directory_is_removed_as_a_whole(tmp_path):
    work = tmp_path / "new" / "work"
    record(work, seed=0)
    with work_directory(work) as folder:
        assert Records(folder, {"seed": 0}).get("step-01") == (1, {})
        (folder / "checkpoints").mkdir()
        remove_records(folder)
    assert not work.exists()


def test_where_nothing_was_recorded_nothing_is_left(tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError), work_directory(tmp_path / "work") as folder:
        Records(folder, {"seed": 0})
        raise ZeroDivisionError
    monkeypatch.setattr(Processes, "current", classmethod(lambda cls: cls(1, 2)))
    with work_directory(tmp_path / "work") as folder:
        assert folder is None, "the second of two processes records nothing"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("work", "output", "message"),
    [
        ("", None, "holds other files: choose a directory that is empty"),
        *((work, output, "must not lie in each other") for work, output in (("a", "a"), ("a/b", "a"), ("a", "a/b"))),
    ],
)
def test_directories_that_are_refused(work, output, message, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=message):
        work_directory(tmp_path / work, output and tmp_path / output).__enter__()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_second_run_raises(tmp_path):
    work = tmp_path / "work"
    with work_directory(work), pytest.raises(BlockingIOError, match="work is in use by another run"):
        work_directory(work).__enter__()
    with work_directory(work):
        pass


def test_a_removal_that_is_killed_leaves_nothing_that_another_run_takes(tmp_path, monkeypatch):
    work = tmp_path / "work"
    record(work, sparsity=0.3)
    with monkeypatch.context() as patch, work_directory(work) as folder:
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)
        remove_records(folder)
    (work / "of a killed run").mkdir()
    assert {file.name for file in work.iterdir()} == {LOCK, f"step-01{SUFFIX}", "of a killed run"}
    with work_directory(work) as folder:
        assert os.listdir(folder) == [LOCK]
        assert Records(folder, {"sparsity": 0.5}).get("step-01") is None
        assert json.loads((folder / IDENTITY).read_text()) == {"sparsity": 0.5}
