import os

import pytest
import torch

from optimum_neuronal.common.processes import Processes
from optimum_neuronal.files import records as module
from optimum_neuronal.files.records import IDENTITY, LOCK, Records, work_directory


@pytest.fixture
def warned(monkeypatch):
    said = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(module.logger, name, said.append)
    return said


def path_of(directory, name="step-01"):
    (path,) = directory.glob(f"{name}.*.safetensors")
    return path


def test_findings_are_found_again(tmp_path):
    written = Records(tmp_path / "new" / "work", {"sparsity": 0.7, "targets": None})
    tensors = {"a.b": torch.arange(6).view(2, 3).T, "bits": torch.tensor([1, 255], dtype=torch.uint8)}
    written.put("step-01", [0.1 + 0.2, float("inf")], tensors)
    value, found = Records(tmp_path / "new" / "work", {"targets": None, "sparsity": 0.7}).get("step-01")
    assert value == [0.1 + 0.2, float("inf")], "to the bit"
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in tensors.items())
    assert written.get("step-02") is None


def test_without_a_directory_nothing_is_recorded():
    records = Records()
    records.put("step-01", 1, {})
    assert records.get("step-01") is None and not records.keeps
    made = iter([(1, {}), (2, {})])
    assert [records.recorded("step-01", lambda: next(made))[0] for _ in range(2)] == [1, 2]


class Second(Processes):
    """The second of two processes. The first has recorded a step."""

    def __init__(self):
        super().__init__(rank=1, count=2)

    def from_first(self, value):
        assert value is None
        return ("the first one's", {})


def test_a_finding_is_made_once_and_is_the_first_processs(tmp_path):
    assert Records(tmp_path).recorded("step-01", lambda: ("made", {})) == ("made", {})
    assert Records(tmp_path).recorded("step-01", lambda: pytest.fail("made again")) == ("made", {})
    assert Records(processes=Second()).recorded("step-02", lambda: pytest.fail("made"))[0] == "the first one's"


def test_another_prunes_directory_is_refused_and_the_changes_are_named(tmp_path):
    begun = {"sparsity": 0.7, "model": "abc", "seed": 0, "topup_args": {"seed": 1, "steps": "block"}}
    Records(tmp_path, begun)
    now = {**begun, "sparsity": 0.6, "model": "xyz", "topup_args": {"steps": "block"}}
    told = r"begun otherwise: model was 'abc', is 'xyz'; sparsity was 0.7, is 0.6; seed was 1, is None \(topup_args\)\. Run"
    with pytest.raises(ValueError, match=told):
        Records(tmp_path, now)


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than an unfinished prune"):
        Records(tmp_path, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_record_is_whole_or_absent(tmp_path, monkeypatch):
    """A crash at any call that touches the disk leaves the record or none."""
    for name in ("fsync", "replace", "open"):
        records = Records(tmp_path / name, {})
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                records.put("step-01", "new", {"x": torch.ones(3)})
        found = Records(tmp_path / name, {}).get("step-01")
        assert found is None or (found[0], found[1]["x"].tolist()) == ("new", [1, 1, 1]), name
        records.put("step-01", "new", {"x": torch.ones(3)})
        assert records.get("step-01")[0] == "new"


def test_a_kill_in_the_very_first_write_does_not_block_the_next(tmp_path):
    (tmp_path / f".{IDENTITY}.123").write_bytes(b"{")
    Records(tmp_path, {"seed": 0})
    assert (tmp_path / IDENTITY).exists()


def test_no_flipped_bit_goes_unnoticed(tmp_path, warned):
    """In the header, in the value, in the tensors: the file is named and set aside, and counts as no record."""
    records = Records(tmp_path, {"seed": 0})
    records.put("step-01", [0.5, "kl"], {"x": torch.arange(5.0), "b": torch.tensor([3, 250], dtype=torch.uint8)})
    path = path_of(tmp_path)
    whole = path.read_bytes()
    damages = [whole[:length] for length in (0, 4, 8, 60, -1)]
    for place in range(0, 8 * len(whole), 5):
        damages.append(bytearray(whole))
        damages[-1][place // 8] ^= 1 << place % 8
    for content in damages:
        path.write_bytes(content)
        assert records.get("step-01") is None and not path.exists()
        assert path.with_name(path.name + ".damaged").read_bytes() == content
        assert f"{path} is damaged" in warned.pop() and not warned
    path.write_bytes(whole)
    value, tensors = records.get("step-01")
    assert value == [0.5, "kl"] and tensors["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_record_of_another_name_or_prune_is_not_taken_for_this_one(tmp_path, warned):
    for name in ("one", "two"):
        Records(tmp_path / name, {"prune": name}).put("step-01", name, {})
    foreign = path_of(tmp_path / "one")
    path_of(tmp_path / "two").unlink()
    foreign.replace(tmp_path / "two" / foreign.name)
    assert Records(tmp_path / "two", {"prune": "two"}).get("step-01") is None
    again = Records(tmp_path / "one", {"prune": "one"})
    again.put("step-01", 1, {})
    path = path_of(tmp_path / "one")
    path.replace(path.with_name(path.name.replace("step-01", "step-02")))
    assert again.get("step-02") is None and len(warned) == 2


def test_a_damaged_identity_loses_no_records(tmp_path, warned):
    Records(tmp_path, {"seed": 0}).put("step-01", 1, {})
    for damage in (b"", b"{", b"[]", b"\xff"):
        (tmp_path / IDENTITY).write_bytes(damage)
        assert Records(tmp_path, {"seed": 0}).get("step-01") == (1, {}) and f"{IDENTITY} is damaged" in warned.pop()
    (tmp_path / IDENTITY).write_bytes(b"{")
    assert Records(tmp_path, {"seed": 1}).get("step-01") is None, "of another prune"


def test_the_target_of_a_link_is_not_written(tmp_path):
    (tmp_path / "precious").write_text("mine")
    work = tmp_path / "work"
    Records(work, {}).put("step-01", 1, {})
    path = path_of(work)
    path.unlink()
    path.symlink_to(tmp_path / "precious")
    Records(work, {}).put("step-01", 1, {})
    assert (tmp_path / "precious").read_text() == "mine" and not path.is_symlink()


def full(*_args):
    raise OSError(28, "No space left on device")


def test_a_full_disk_loses_records_and_stops_nobody(tmp_path, warned, monkeypatch):
    records = Records(tmp_path, {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        records.put("step-01", 1, {})
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY], "no temporary file is left"
    assert len(warned) == 1 and "No space left on device" in warned[0] and "the prune goes on" in warned[0]
    records.put("step-03", 3, {})
    assert records.get("step-01") is None and records.get("step-03") == (3, {})


def test_a_disk_that_is_full_from_the_beginning(tmp_path, warned, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    records = Records(tmp_path, {})
    records.put("step-01", 1, {})
    assert not records.keeps and not list(tmp_path.iterdir()) and len(warned) == 1


def used(path):
    """As a prune that was interrupted leaves it."""
    with work_directory(path) as folder:
        Records(folder.path, {"seed": 0}).put("step-01", 1, {})
    return path


def test_records_stay_until_they_are_removed(tmp_path):
    work = used(tmp_path / "new" / "work")
    with work_directory(work) as folder:
        assert Records(folder.path, {"seed": 0}).get("step-01") == (1, {})
        folder.remove()
    assert not work.exists()


def test_where_nothing_was_recorded_nothing_is_left(tmp_path):
    with pytest.raises(ZeroDivisionError), work_directory(tmp_path / "work"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with work_directory(None) as folder:
        assert folder.path is None
        folder.remove()


def test_of_several_processes_the_first_records(tmp_path, monkeypatch):
    monkeypatch.setattr(Processes, "current", classmethod(lambda cls: cls(1, 2)))
    with work_directory(tmp_path / "work") as folder:
        assert folder.path is None and not (tmp_path / "work").exists()


def test_the_second_prune_is_told_who_uses_it(tmp_path):
    work = tmp_path / "work"
    told = f"work is in use by process {os.getpid()} on .*: wait for it to end"
    with work_directory(work), pytest.raises(BlockingIOError, match=told):
        work_directory(work).__enter__()
    with work_directory(work):
        pass


def test_only_its_own_files_are_removed(tmp_path):
    work = used(tmp_path / "work")
    record = path_of(work).name
    (work / "model").mkdir()
    for name in ("model/model.safetensors", "notes.txt", "model-00001.safetensors"):
        (work / name).write_text("mine")
    for name in (".identity.json.0123abcd", f".{record}.0123abcd", f"{record}.damaged"):
        (work / name).write_text("left by a kill, or damaged")
    with work_directory(work) as folder:
        folder.remove()
    assert sorted(os.listdir(work)) == ["model", "model-00001.safetensors", "notes.txt"]
    assert (work / "model" / "model.safetensors").read_text() == "mine"


def test_a_link_and_the_working_directory_stay(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with work_directory(used(tmp_path / "link")) as folder:
        folder.remove()
    assert (tmp_path / "link").is_symlink() and not os.listdir(tmp_path / "target")
    monkeypatch.chdir(tmp_path / "target")
    with work_directory(used(".")) as folder:
        folder.remove()
    assert not os.listdir(tmp_path / "target")


def test_a_failure_to_remove_is_a_warning(tmp_path, monkeypatch, warned):
    """The model is saved by then."""
    work = used(tmp_path / "work")

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    with work_directory(work) as folder, monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        patch.setattr(os, "rmdir", refuse)
        folder.remove()
    assert len(warned) == 1 and "could not be removed: " in warned[0]
    assert {IDENTITY, LOCK} <= set(os.listdir(work))


def test_a_work_directory_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="Cannot record in .*file is a file"):
        work_directory(tmp_path / "file").__enter__()
    with pytest.raises(ValueError, match="Cannot record in '': the name is empty"):
        work_directory("").__enter__()
