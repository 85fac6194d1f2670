import os

import pytest
import torch

from optimum_neuronal.files import journal as journal_module
from optimum_neuronal.files.journal import DAMAGED, IDENTITY, RECORDS, SUFFIX, Journal


@pytest.fixture
def warned(monkeypatch):
    said = []
    monkeypatch.setattr(journal_module.logger, "warning", said.append)
    return said


def test_what_is_recorded_is_found_again(tmp_path):
    written = Journal(tmp_path / "new" / "work", {"sparsity": 0.7, "targets": None})
    tensors = {"a.b": torch.arange(6).view(2, 3).T, "bits": torch.tensor([1, 255], dtype=torch.uint8)}
    written.put("step-01", [0.1 + 0.2, float("inf")], tensors)
    value, found = Journal(tmp_path / "new" / "work", {"targets": None, "sparsity": 0.7}).get("step-01")
    assert value == [0.1 + 0.2, float("inf")], "to the bit"
    assert all(torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in tensors.items())
    assert written.get("step-02") is None
    written.drop("step-01")
    assert written.get("step-01") is None


def test_without_a_directory_nothing_is_kept():
    journal = Journal()
    journal.put("step-01", 1)
    journal.drop("step-01")
    assert journal.get("step-01") is None and not journal.keeps


def test_what_changed_is_named(tmp_path):
    Journal(tmp_path, {"sparsity": 0.7, "model": "abc", "seed": 0})
    with pytest.raises(ValueError, match=r"begun otherwise: model was 'abc', is 'xyz'; sparsity was 0.7, is 0.6\."):
        Journal(tmp_path, {"sparsity": 0.6, "model": "xyz", "seed": 0})


def test_what_changed_within_a_mapping_is_named_alone(tmp_path):
    Journal(tmp_path, {"topup_args": {"seed": 1, "steps": "block"}, "seed": 0})
    with pytest.raises(ValueError, match=r"begun otherwise: seed was 1, is None \(topup_args\)\. Run it"):
        Journal(tmp_path, {"topup_args": {"steps": "block"}, "seed": 0})


@pytest.mark.parametrize(
    ("begun", "now", "told"), [({}, {RECORDS: 2}, "an earlier"), ({RECORDS: 3}, {RECORDS: 2}, "a later")]
)
def test_records_of_another_format_are_refused_whatever_else_changed(begun, now, told, tmp_path):
    Journal(tmp_path, {**begun, "seed": 0})
    with pytest.raises(ValueError, match=f"begun by {told} release of optimum_neuronal, .*: delete it to begin anew"):
        Journal(tmp_path, {**now, "seed": 1})


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than an unfinished prune"):
        Journal(tmp_path, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_record_is_whole_or_absent(tmp_path, monkeypatch):
    """A crash at any call that touches the disk leaves the old record or the new one."""
    journal = Journal(tmp_path, {})
    journal.put("step-01", "old", {"x": torch.zeros(3)})
    calls = [(os, "fsync"), (os, "replace"), (os, "open")]
    for module, name in calls:
        with monkeypatch.context() as patch:
            patch.setattr(journal_module.os, name, lambda *_args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                journal.put("step-01", "new", {"x": torch.ones(3)})
        value, tensors = Journal(tmp_path, {}).get("step-01")
        assert (value, tensors["x"].tolist()) in (("old", [0, 0, 0]), ("new", [1, 1, 1])), (module, name)
    journal.put("step-01", "newest")
    assert journal.get("step-01") == ("newest", {})


def test_a_kill_in_the_very_first_write_does_not_block_the_next(tmp_path):
    (tmp_path / f".{IDENTITY}.123").write_bytes(b"{")
    Journal(tmp_path, {"seed": 0})
    assert (tmp_path / IDENTITY).exists()


def test_no_flipped_bit_goes_unnoticed(tmp_path, warned):
    """In the header, in the value, in the tensors: the file is named and set aside, and the record counts as absent."""
    journal = Journal(tmp_path, {"seed": 0})
    journal.put("step-01", [0.5, "kl"], {"x": torch.arange(5.0), "b": torch.tensor([3, 250], dtype=torch.uint8)})
    path = tmp_path / f"step-01{SUFFIX}"
    whole = path.read_bytes()
    for place in range(0, 8 * len(whole), 5):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        found = journal.get("step-01")
        assert found is None and not path.exists(), place
        assert path.with_name(path.name + DAMAGED).read_bytes() == content
        assert f"step-01{SUFFIX} is damaged" in warned.pop() and not warned
    path.write_bytes(whole)
    value, tensors = journal.get("step-01")
    assert value == [0.5, "kl"] and tensors["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("length", [0, 4, 8, 60, -1])
def test_a_truncated_record_is_set_aside(tmp_path, warned, length):
    journal = Journal(tmp_path, {})
    journal.put("step-01", 1, {"x": torch.ones(9)})
    path = tmp_path / f"step-01{SUFFIX}"
    path.write_bytes(path.read_bytes()[:length])
    assert journal.get("step-01") is None and "is damaged" in warned[0]
    journal.put("step-01", 2)
    assert Journal(tmp_path, {}).get("step-01") == (2, {}), "it is made anew"


def test_a_record_of_another_name_or_prune_is_not_taken_for_this_one(tmp_path, warned):
    for name in ("one", "two"):
        Journal(tmp_path / name, {"prune": name}).put("step-01", name)
    (tmp_path / "one" / f"step-01{SUFFIX}").replace(tmp_path / "two" / f"step-01{SUFFIX}")
    assert Journal(tmp_path / "two", {"prune": "two"}).get("step-01") is None
    again = Journal(tmp_path / "one", {"prune": "one"})
    again.put("step-01", 1)
    (tmp_path / "one" / f"step-01{SUFFIX}").replace(tmp_path / "one" / f"step-02{SUFFIX}")
    assert again.get("step-02") is None and len(warned) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_identity_costs_no_records(tmp_path, warned, damage):
    Journal(tmp_path, {"seed": 0}).put("step-01", 1)
    (tmp_path / IDENTITY).write_bytes(damage)
    assert Journal(tmp_path, {"seed": 0}).get("step-01") == (1, {}) and f"{IDENTITY} is damaged" in warned[0]
    (tmp_path / IDENTITY).write_bytes(damage)
    assert Journal(tmp_path, {"seed": 1}).get("step-01") is None, "of another prune"


def test_what_a_link_points_to_is_not_written(tmp_path):
    (tmp_path / "precious").write_text("mine")
    work = tmp_path / "work"
    work.mkdir()
    for name in (f".{IDENTITY}.{os.getpid()}", f".step-01{SUFFIX}.{os.getpid()}"):
        (work / name).symlink_to(tmp_path / "precious")
    Journal(work, {}).put("step-01", 1)
    assert (tmp_path / "precious").read_text() == "mine"


def full(*_args):
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_records_and_stops_nobody(tmp_path, warned, monkeypatch):
    journal = Journal(tmp_path, {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        journal.put("step-01", 1)
        journal.put("step-02", 2)
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY], "no temporary file is left"
    assert len(warned) == 1 and "No space left on device" in warned[0] and "the prune goes on" in warned[0]
    journal.put("step-03", 3)
    assert journal.get("step-01") is None and journal.get("step-03") == (3, {})


def test_a_disk_that_is_full_from_the_beginning(tmp_path, warned, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    journal = Journal(tmp_path, {})
    journal.put("step-01", 1)
    assert not journal.keeps and not list(tmp_path.iterdir()) and len(warned) == 1
