import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from optimum_neuronal.common.processes import Processes
from optimum_neuronal.files import records as module
from optimum_neuronal.files.records import IDENTITY, SUFFIX, Records, remove_records, weights_directory, work_directory


@pytest.fixture
def warned(monkeypatch):
    messages = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(module.logger, name, messages.append)
    return messages


def test_findings_are_found_again(tmp_path):
    written = Records(tmp_path / "new" / "work", {"sparsity": 0.7, "targets": None})
    tensors = {"a.b": torch.arange(6).view(2, 3).T, "bits": torch.tensor([1, 255], dtype=torch.uint8)}
    written.put("step-01", [0.1 + 0.2, float("inf")], tensors)
    value, found = Records(tmp_path / "new" / "work", {"targets": None, "sparsity": 0.7}).get("step-01")
    assert value == [0.1 + 0.2, float("inf")], "to the bit"
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in tensors.items())
    assert written.get("step-02") is None


class Second(Processes):
    """The second of two processes. The first has recorded a step."""

    def __init__(self):
        super().__init__(rank=1, count=2)

    def from_first(self, value):
        assert value is None
        return ("the first one's", {})


def test_a_finding_is_made_once_and_is_the_first_processs(tmp_path):
    first, second = Records(tmp_path), Records(tmp_path)
    assert first.recorded("step-01", lambda: ("made", {})) == first.get("step-01") == ("made", {})
    assert second.recorded("step-01", lambda: pytest.fail("made again")) == ("made", {})
    assert (first.resumed, second.resumed) == (False, True), "its own record is not an earlier run's"
    assert Records(processes=Second()).recorded("step-02", lambda: pytest.fail("made"))[0] == "the first one's"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sparsity": 0.6, "model": "xyz"}, "model was 'abc', is 'xyz'; sparsity was 0.7, is 0.6"),
        ({"topup_args": {"steps": "block"}}, "topup_args was {'seed': 1, .*}, is {'steps': 'block'}"),
        ({"format": 2}, "format was None, is 2"),
        ({"seed": None}, "seed was 0, is None"),
    ],
)
def test_a_directory_of_another_prune(changed, message, tmp_path):
    """A setting that is new or gone counts too."""
    before = {"sparsity": 0.7, "model": "abc", "seed": 0, "topup_args": {"seed": 1, "steps": "block"}}
    Records(tmp_path, before)
    now = {name: value for name, value in {**before, **changed}.items() if value is not None}
    with pytest.raises(ValueError, match=f"started with different settings: {message}"):
        Records(tmp_path, now)


def test_a_directory_of_another_command(tmp_path):
    Records(tmp_path, {"model": "abc", **{f"p{i}": i for i in range(9)}})
    with pytest.raises(
        ValueError, match=r"settings: p0, p1, p2 and 6 others\. Another command may have started it\. Use"
    ):
        Records(tmp_path, {"model": "abc"})


def test_a_directory_of_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        Records(tmp_path, {})


@pytest.mark.parametrize("call", ["replace", "open"])
def test_a_record_is_whole_or_absent(tmp_path, monkeypatch, call):
    records = Records(tmp_path, {})
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(os if call == "replace" else module.Path, call, lambda *_args, **_kwargs: 1 / 0)
        records.put("step-01", "new", {"x": torch.ones(3)})
    assert Records(tmp_path, {}).get("step-01") is None
    records.put("step-01", "new", {"x": torch.ones(3)})
    assert records.get("step-01")[0] == "new"


def damaged():
    """Records with one byte changed: in a tensor's name, in its values, and in the JSON value."""
    tensors = {"name": torch.arange(6), "other": torch.ones(2)}
    records = Records(Path(tempfile.mkdtemp()))
    records.put("step", {"starved": []}, tensors)
    whole = next(records.directory.glob(f"*{SUFFIX}")).read_bytes()
    shutil.rmtree(records.directory)
    for part in (b"name", b"starved", torch.ones(2).numpy().tobytes(), b"/value"):
        assert part in whole
        yield whole.replace(part, part[:-1] + b"y")


@pytest.mark.parametrize("content", [save({"x": torch.ones(1)}), b"cut short", *damaged()])
def test_a_file_that_is_no_record_is_made_again(content, tmp_path, warned):
    records = Records(tmp_path)
    (tmp_path / f"step-01{SUFFIX}").write_bytes(content)
    assert records.recorded("step-01", lambda: (2, {})) == (2, {}) and "is damaged" in warned[0]
    assert records.get("step-01") == (2, {})


def test_a_full_disk_loses_records_and_stops_nobody(tmp_path, warned, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    records = Records(tmp_path, {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        records.put("step-01", 1, {})
    assert os.listdir(tmp_path) == [IDENTITY], "no temporary file is left"
    assert len(warned) == 1 and "No space left on device" in warned[0]
    records.put("step-03", 3, {})
    assert records.get("step-01") is None and records.get("step-03") == (3, {})


def used(path):
    """Return a directory as a prune that was interrupted leaves it."""
    with work_directory(path) as folder:
        Records(folder, {"seed": 0}).put("step-01", 1, {})
    return path


def test_records_stay_until_they_are_removed(tmp_path):
    work = used(tmp_path / "new" / "work")
    with work_directory(work) as folder:
        assert Records(folder, {"seed": 0}).get("step-01") == (1, {})
        remove_records(folder)
    assert not work.exists()


def test_where_nothing_was_recorded_nothing_is_left(tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError), work_directory(tmp_path / "work"):
        raise ZeroDivisionError
    monkeypatch.setattr(Processes, "current", classmethod(lambda cls: cls(1, 2)))
    with work_directory(tmp_path / "work") as folder:
        assert folder is None, "the second of two processes records nothing"
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with work_directory(tmp_path / "mine"):
        pass
    assert not list((tmp_path / "mine").iterdir()), "which was there before"


def test_a_second_prune_raises(tmp_path):
    work = tmp_path / "work"
    with work_directory(work), pytest.raises(BlockingIOError, match="work is in use by another run"):
        work_directory(work).__enter__()
    with work_directory(work):
        pass


@pytest.mark.parametrize("stopped_after", range(4))
def test_a_removal_that_is_killed_leaves_nothing_that_another_prune_takes(stopped_after, tmp_path, monkeypatch):
    work, left, unlink = tmp_path / "work", stopped_after, Path.unlink
    records = Records(work, {"sparsity": 0.3})
    for name in ("step-01", "block-00000", "zz"):
        records.put(name, 1, {})

    def stop(path, **options):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        unlink(path, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", stop)
        remove_records(work)
    with pytest.raises(ValueError, match="sparsity was 0.3, is 0.5"):
        Records(work, {"sparsity": 0.5})


def test_records_without_an_identity_are_never_used(tmp_path, warned):
    work = used(tmp_path / "work")
    (work / IDENTITY).unlink()
    assert Records(work, {"seed": 0}).get("step-01") is None and not list(work.glob(f"*{SUFFIX}"))
    assert "records without identity.json" in warned[0]


@pytest.mark.parametrize("content", [b"", b"{", b"[[1, 2]]", b"null", b"\xff", b"[" * 10**6])
def test_damaged_settings_are_named(content, tmp_path):
    work = used(tmp_path / "work")
    (work / IDENTITY).write_bytes(content)
    with pytest.raises(ValueError, match="identity.json is damaged: delete"):
        Records(work, {})


def test_only_its_own_files_are_removed(tmp_path):
    work = used(tmp_path / "work")
    (work / "model").mkdir()
    for name in ("model/model.safetensors", "notes.txt", "model-00001.safetensors"):
        (work / name).write_text("mine")
    (work / f".{IDENTITY}.7.tmp").write_text("left by a kill")
    with work_directory(work) as folder:
        remove_records(folder)
    assert sorted(os.listdir(work)) == ["model", "model-00001.safetensors", "notes.txt"]


def test_the_directory_of_weights_is_of_one_command(tmp_path):
    (tmp_path / "own" / "weights").mkdir(parents=True)
    (tmp_path / "own" / "weights" / "of a killed one").touch()
    with pytest.raises(ZeroDivisionError), weights_directory(tmp_path / "own") as directory:
        assert not list(directory.iterdir())
        (directory / "weights").touch()
        with (
            pytest.raises(BlockingIOError, match="own is in use by another run"),
            weights_directory(tmp_path / "own"),
        ):
            pytest.fail("entered")
        assert (directory / "weights").exists()
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
