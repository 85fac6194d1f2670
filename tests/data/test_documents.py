import os

import datasets
import pytest
import torch
from texts import MIXED, document, draw

from optimum_neuronal.data.documents import check_dataset, load_documents


def test_column_of_a_dataset(tokenizer):
    for columns in ({"text": ["a"], "other": ["b"]}, {"body": ["a"], "year": [1]}):
        assert list(load_documents(datasets.Dataset.from_dict(columns))) == ["a"]
    for columns, usual in ({"one": ["a"], "two": ["b"]}, "one"), ({"id": ["a"], "content": ["b"]}, "content"):
        dataset = datasets.Dataset.from_dict(columns)
        message = f"no column 'text', it has: {', '.join(columns)}. Name the one of the text: dataset.(.*)$"
        with pytest.raises(ValueError, match=message) as caught:
            load_documents(dataset)
        assert list(load_documents(eval(str(caught.value).rpartition(": ")[2]))) == columns[usual]
    dataset = datasets.Dataset.from_dict({"text": MIXED})
    assert torch.equal(draw(dataset, tokenizer).ids, draw(MIXED, tokenizer).ids)


def test_txt_is_one_stream(tmp_path, tokenizer):
    path, text = tmp_path / "book.txt", document(0, 100).replace("w50 ", "w50\n\n")
    path.write_text("\ufeff" + text, encoding="utf-8")
    result = draw(path, tokenizer)
    assert result.drawn_from == "stream" and result.source == "book.txt"
    assert load_documents(str(path)).joined and list(load_documents(path)) == [text]


def test_jsonl(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a\u2028b", "code": "c"}\n\n{"text": "d", "code": "e"}\n', encoding="utf-8")
    assert list(load_documents(path)) == ["a\u2028b", "d"]
    assert list(load_documents(f"{path}:code")) == ["c", "e"]
    assert load_documents(path).source == "data.jsonl, column text"
    path.write_text('{"text": "a", "n": 1}\n{"text": "b", "n": "x"}\n')  # of another column of several types
    assert list(load_documents(path)) == ["a", "b"]


def test_csv(tmp_path):
    path, long = tmp_path / "data.csv", "word " * 40_000
    path.write_text(f'\ufeffid,text\r\n1,"a, ""b""\nc"\r\n\r\n2,NA\r\n3,{long}\r\n', encoding="utf-8", newline="")
    assert list(load_documents(path)) == ['a, "b"\nc', "NA", long]
    assert load_documents(path).source == "data.csv, column text"
    path.write_text("body\nonly one column\n")
    assert list(load_documents(path)) == ["only one column"]


def test_parquet(tmp_path):
    path = str(tmp_path / "data.parquet")
    datasets.Dataset.from_dict({"text": ["a", "b"], "code": ["c", "d"]}).to_parquet(path)
    assert list(load_documents(path)) == ["a", "b"]
    assert list(load_documents(path + ":code")) == ["c", "d"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "a"}\n{', "a.jsonl' could not be read as .jsonl: JSON parse error"),
        ("a.jsonl", '{"text": "a"}\n' + "[" * 100_000, "a.jsonl' could not be read as .jsonl: JSON parse error"),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\ud800"}', "could not be read as .jsonl: .*surrogate"),
        ("a.jsonl", '{"text": "a"}\n{"x": "1"}', "Document 1 of a.jsonl, column text is of type NoneType"),
        ("a.jsonl", "", "a.jsonl' could not be read as .jsonl: it is empty"),
        (
            "a.jsonl",
            '{"id": "1", "content": "2"}',
            "a.jsonl. has no column 'text', it has: id, content. .*a.jsonl:content$",
        ),
        ("a.csv", "one,two\na,b\n", "a.csv. has no column 'text', it has: one, two"),
        ("a.csv", "text,n\na, b,c\n", "a.csv' could not be read as .csv: .*loss of data"),
        ("a.csv", "text,n\na,b\na, b,c\n", "a.csv' could not be read as .csv: .*Expected 2 fields in line 3, saw 3"),
        ("a.csv", "", "a.csv' could not be read as .csv: No columns"),
        ("a.csv", 'text\n"a', "a.csv' could not be read as .csv: .*EOF inside string"),
        ("a.csv", "text\n1\n2\n", "Document 0 of a.csv, column text is of type int"),
        ("a.parquet", "no parquet", "a.parquet' could not be read as .parquet"),
        ("a.txt", b"\xe9", "a.txt' is not UTF-8 text"),
        ("a.txt", " ", "a.txt. holds only blank documents"),
        ("a.docx", "a", "a.docx' is a file of an unknown kind: pass a file that ends in .txt, .csv"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for check in (load_documents, check_dataset):  # a file is checked whole, before long work
        with pytest.raises((ValueError, TypeError), match=message):
            check(str(tmp_path / name))


def test_wrong_paths(tmp_path):
    for name in (str(tmp_path / "gone.txt"), "gone.jsonl:code"):
        with pytest.raises(FileNotFoundError, match="gone.(txt|jsonl)' does not exist"):
            load_documents(name)
    with pytest.raises(FileNotFoundError, match="folder .*gone' does not exist"):
        load_documents(str(tmp_path / "gone"))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="has no column 'code'"):
        load_documents(f"{tmp_path / 'a.txt'}:code")
    with pytest.raises(ValueError, match="Did you mean 'wikitext2'"):
        check_dataset("wikitext-2")


def test_an_entry_with_a_lone_surrogate():
    message = "Document 1 of a list of 2 strings has a lone surrogate, '.ud800', at character 2"
    with pytest.raises(ValueError, match=message):
        load_documents(["a", "b \ud800"])


def test_a_file_is_the_one_named_and_read_anew(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for name in ("a[1].parquet", "b*.parquet", "b?.parquet", "**.parquet", "{a,b}.parquet"):
        for other in ("a1.parquet", "b1.parquet", "b2.parquet", name):
            datasets.Dataset.from_dict({"text": [f"of {other}"]}).to_parquet(tmp_path / other)
        assert list(load_documents(tmp_path / name)) == [f"of {name}"]
        assert load_documents(tmp_path / name).source == f"{name}, column text"
    path, times = tmp_path / "data.parquet", []
    for text in ("old", "new"):
        datasets.Dataset.from_dict({"text": [text], "more": [1]}).to_parquet(path)
        times = times or [path.stat().st_atime_ns, path.stat().st_mtime_ns]
        os.utime(path, ns=tuple(times))
        assert list(load_documents(path)) == [text]
    assert not cache.exists(), "the user's cache holds no copies"


class TestFolders:
    def test_of_txt(self, tmp_path):
        (tmp_path / "more").mkdir()
        (tmp_path / "a.txt").write_text("one\ntwo")
        (tmp_path / "more" / "b.txt").write_text("three\n\nfour")
        (tmp_path / "README.md").write_text("no text")
        documents = load_documents(tmp_path)
        assert list(documents) == ["one\ntwo", "three\n\nfour"] and not documents.joined
        assert documents.source == f"{tmp_path.name}, column text"

    def test_of_splits(self, tmp_path):
        (tmp_path / "train.jsonl").write_text('{"text": "a", "code": "c"}\n')
        assert list(load_documents(tmp_path, "test")) == ["a"], "the only split"
        (tmp_path / "test.jsonl").write_text('{"text": "b", "code": "d"}\n')
        assert list(load_documents(tmp_path)) == ["a"] and list(load_documents(tmp_path, "test")) == ["b"]
        assert list(load_documents(f"{tmp_path}:code")) == ["c"]
        check_dataset(str(tmp_path), "test")

    def test_that_datasets_saved(self, tmp_path):
        dataset = datasets.Dataset.from_dict({"text": ["a"], "code": ["c"]})
        dataset.save_to_disk(tmp_path / "one")
        datasets.DatasetDict(train=dataset, other=dataset).save_to_disk(tmp_path / "two")
        assert list(load_documents(tmp_path / "one")) == list(load_documents(tmp_path / "two")) == ["a"]
        assert list(load_documents(f"{tmp_path / 'two'}:code")) == ["c"]
        message = "two' could not be read as dataset: it has no split 'test', but train, other"
        with pytest.raises(ValueError, match=message):
            load_documents(tmp_path / "two", "test")

    def test_refused(self, tmp_path):
        with pytest.raises(ValueError, match="is a folder with no such files: pass a file that ends in .txt"):
            load_documents(tmp_path)
        (tmp_path / "a.txt").write_text("text")
        (tmp_path / "a.csv").write_text("text\na\n")
        with pytest.raises(ValueError, match="is a folder with .csv and .txt files"):
            load_documents(tmp_path)
        (tmp_path / "a.txt").unlink()
        (tmp_path / f"{tmp_path.name}.py").write_text("raise SystemExit")
        with pytest.raises(ValueError, match="Dataset scripts are no longer supported"):
            load_documents(tmp_path)
