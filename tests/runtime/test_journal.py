import os

import pytest
import torch

from optimum_neuronal.runtime import journal as journal_module
from optimum_neuronal.runtime.journal import IDENTITY, RECORDS, Journal


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
