import datasets
import pytest
import torch
from texts import MIXED, draw

from optimum_neuronal.data import documents
from optimum_neuronal.data.documents import load_documents


class TestDataset:
    def test_column(self):
        assert list(load_documents(datasets.Dataset.from_dict({"text": ["a"], "other": ["b"]}))) == ["a"]
        assert list(load_documents(datasets.Dataset.from_dict({"body": ["a"], "year": [1]}))) == ["a"]
        with pytest.raises(ValueError, match="no column 'text', it has: one, two"):
            load_documents(datasets.Dataset.from_dict({"one": ["a"], "two": ["b"]}))

    def test_draws(self, tokenizer):
        dataset = datasets.Dataset.from_dict({"text": MIXED})
        assert torch.equal(draw(dataset, tokenizer).ids, draw(MIXED, tokenizer).ids)


def test_files_are_checked_whole(tmp_path):
    (tmp_path / "blank.txt").write_text(" ")
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n{"txet": "two"}\n')
    for name, message in (
        ("blank.txt", "only blank documents"),
        ("text.jsonl", "Line 2"),
        ("absent.txt", "not exist"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            documents.check_dataset(str(tmp_path / name))
    (tmp_path / "text.txt").write_text("some text")
    documents.check_dataset(str(tmp_path / "text.txt"))
    with pytest.raises(ValueError, match="Did you mean 'wikitext2'"):
        documents.check_dataset("wikitext-2")
