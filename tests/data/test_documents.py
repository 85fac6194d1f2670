import itertools
import json

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from texts import MIXED, document, draw

from optimum_neuronal.data import documents as module
from optimum_neuronal.data.documents import load_documents
from optimum_neuronal.data.known_datasets import KNOWN_DATASETS, parse_name


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_column_of_a_dataset(tokenizer):
    for columns in ({"text": ["a"], "other": ["b"]}, {"body": ["a"]}):
        assert list(load_documents(datasets.Dataset.from_dict(columns))) == ["a"]
    for columns, names in (({"body": ["a"], "year": [1]}, "body, year"), ({}, "none")):
        with pytest.raises(ValueError, match=f"no column text, .*, only {names}. Name one after a colon"):
            load_documents(datasets.Dataset.from_dict(columns))
    dataset = datasets.Dataset.from_dict({"text": MIXED, "prompt": MIXED})
    for given in (dataset, dataset["prompt"], dataset.select(range(len(MIXED)))["text"]):
        assert torch.equal(draw(given, tokenizer).ids, draw(MIXED, tokenizer).ids)
    for other in (np.array(["a text"]), datasets.DatasetDict()):
        with pytest.raises(TypeError, match=f"of type {type(other).__name__} is not supported. Pass .* one split"):
            draw(other, tokenizer)


def test_nulls_count_as_empty(tokenizer, tmp_path):
    texts, expected = [None, *MIXED, None], draw(["", *MIXED, ""], tokenizer).ids
    dataset = datasets.Dataset.from_dict({"text": texts})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for given in (dataset, dataset["text"], texts, tmp_path / "a.jsonl"):
        assert torch.equal(draw(given, tokenizer).ids, expected)
    for nothing in ([], [None, " \n"], datasets.Dataset.from_dict({"text": [None, None]})):
        with pytest.raises(ValueError, match="holds no text"):
            load_documents(nothing)


@pytest.mark.parametrize("name", ["book.txt", "wiki.test.RAW"])
def test_a_text_file_is_one_stream(tmp_path, tokenizer, name):
    path, text = tmp_path / name, document(0, 100).replace("w50 ", "w50\n\n")
    path.write_text("\ufeff" + text, encoding="utf-8")
    result = draw(path, tokenizer)
    assert result.drawn_from == "stream" and result.source == name
    assert load_documents(str(path)).joined and list(load_documents(path)) == [text]
    with pytest.raises(ValueError, match="is text, which has no columns: leave out ':code'"):
        parse_name(f"{path}:code")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a\u2028b", "code": "c"}\n\n{"text": "NA", "code": "d"}\n'),
        ("a.json", '[{"text": "a\u2028b", "code": "c"}, {"text": "NA", "code": "d"}]'),
        ("a[1].csv", "text,code\na\u2028b,c\nNA,d\n"),
    ],
)
def test_files_with_columns(tmp_path, name, content):
    file = tmp_path / "[b]*" / name
    file.parent.mkdir()
    file.write_text(content, encoding="utf-8")
    assert list(load_documents(file)) == ["a\u2028b", "NA"]
    assert list(load_documents(f"{file}:code")) == ["c", "d"]
    assert load_documents(file).source == name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": "b', "the dataset a.jsonl: line 3 is not valid JSON: Unterminated"),
        ("a.txt", "é", "Could not load the dataset a.txt: 'utf-8' codec"),
        ("a.jsonl", "", "Could not load the dataset a.jsonl: it is empty"),
        ("a.json", '{"version": "1", "data": [{"text": "a"}]}', "a.json. has no column text, .*, only version, data"),
        ("a.csv", "text\n1\n2\n", "Document 0 of a.csv is a int"),
        ("a.parquet", "no parquet", "Could not load the dataset a.parquet"),
        ("a.txt", " ", "a.txt. holds no text"),
        ("a.docx", "a", "does not exist, or is not a single file that ends in .txt, .text"),
        ("folder/a.txt", "a", "is not a single file .* load anything else with datasets.load_dataset"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError), match=message):
        load_documents(str(tmp_path / name).replace("/a.txt", "" if "folder" in name else "/a.txt"))


def test_names_that_mean_nothing(tmp_path):
    nothing = ("", "some text to use", "a/b/c", "me/data:", "me/data:a:b:c:d", "me/data::text")
    for names, error, message in (
        ((str(tmp_path / "gone.txt"), "gone.jsonl:code", "./gone"), FileNotFoundError, "does not exist"),
        (("wikitext", "WikiText2", "C4", "wikitxt2:train"), ValueError, r"Did you mean '(wikitext2|c4)'\?"),
        (nothing, ValueError, "is not a known name .*pass text itself as a list"),
    ):
        for name in names:
            with pytest.raises(error, match=message):
                parse_name(name)


def put_in_cache(folder, name, split):
    """Write a file of a known dataset where huggingface_hub keeps what was downloaded."""
    known, texts = KNOWN_DATASETS[name], [f"{name} {split} {i}" for i in range(1200)]
    repository = folder / f"datasets--{known.path.replace('/', '--')}"
    file = repository / "snapshots" / "abc" / known.config / (known.test if split == "test" else known.train)
    for made in (reference := repository / "refs" / (known.revision or "main"), file):
        made.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text("abc")
    rows = datasets.Dataset.from_dict({known.column: texts, "timestamp": ["x"] * len(texts)})
    rows.to_parquet(file) if file.suffix == ".parquet" else rows.to_json(file, compression="gzip")


class TestHub:
    @pytest.mark.parametrize("split", ["train", "test"])
    @pytest.mark.parametrize("name", KNOWN_DATASETS)
    def test_known_datasets_are_read_from_the_cache_without_a_connection(self, tmp_path, monkeypatch, name, split):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path)
        put_in_cache(tmp_path, name, split)
        documents = load_documents(name, split)
        assert documents[0] == f"{name} {split} 0"
        assert documents.source == f"{name} ({KNOWN_DATASETS[name].path}, split {split})"
        is_test_of_c4 = (name, split) == ("c4", "test")
        assert (len(documents), documents.max_windows) == ((1100, 256) if is_test_of_c4 else (1200, None))
        assert documents.joined == (name != "c4") and documents.separator == ("\n\n" if name == "wikitext2" else " ")

    @pytest.mark.parametrize(
        ("name", "config", "split"),
        [
            ("me/data", None, "test"),
            ("me/data:dev", None, "dev"),
            ("me/data:dev:sentence", None, "dev"),
            ("me/data:en:dev:sentence", "en", "dev"),
        ],
    )
    def test_what_is_loaded(self, monkeypatch, name, config, split):
        calls, columns = [], {"text": ["first", "last"], "sentence": ["last", "first"]}
        data = datasets.Dataset.from_dict(columns)
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or data)
        documents = load_documents(name, "test")
        assert calls == [(("me/data",), {"name": config, "split": split})]
        assert documents[0] == ("last" if "sentence" in name else "first")
        assert name in documents.source and f"split {split}" in documents.source


def endless(start=0):
    for i in itertools.count(start):
        yield {"id": i, "text": f"w{i}" if i % 2 else None}


def test_streams(tokenizer, monkeypatch):
    """The first documents are read, for training all of them."""
    monkeypatch.setattr(module, "STREAM_DOCUMENTS", 6)
    stream = datasets.IterableDataset.from_generator(endless)
    documents = load_documents(stream)
    assert list(documents) == ["", "w1", "", "w3", "", "w5"]
    assert documents.source == "the first 6 documents of a datasets.IterableDataset"
    assert draw(stream, tokenizer, num_samples=1, seq_length=3).ids.tolist() == [[1, 3, 5]]
    with pytest.raises(ValueError, match="only id, body. Name one .* rename one to text"):
        load_documents(stream.rename_column("text", "body").map(lambda row: {**row, "body": [1]}))
    with pytest.raises(ValueError, match="holds no text"):
        load_documents(stream.take(1))
    documents = load_documents(stream, streaming=True)
    assert documents.source == "a datasets.IterableDataset"
    assert [*itertools.islice(documents.shuffled(0), 1, 200, 2)] == [f"w{i}" for i in range(1, 200, 2)]


class TestTrainingText:
    def test_each_document_once_in_an_order_that_the_seed_decides(self, tmp_path):
        texts = [*(f"w{i}" for i in range(20)), "", ""]
        order = list(load_documents(texts, streaming=True).shuffled(3))
        assert sorted(order) == sorted(texts) and order != texts
        dataset = datasets.Dataset.from_dict({"text": texts})
        assert list(load_documents(dataset, streaming=True).shuffled(3)) == order
        assert list(load_documents(dataset, streaming=True).shuffled(4)) != order
        (tmp_path / "a.txt").write_text("one\n\ntwo")
        assert list(load_documents(tmp_path / "a.txt", streaming=True).shuffled(0)) == ["one\n\ntwo"]

    @pytest.mark.parametrize("connected", [True, False])
    def test_c4_is_streamed_or_read_from_the_cache_in_the_same_order(self, tmp_path, monkeypatch, connected):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path)
        monkeypatch.setattr(module, "is_connected", lambda: connected)
        put_in_cache(tmp_path, "c4", "train")
        calls, load = [], datasets.load_dataset

        def load_dataset(path, **options):
            calls.append((path, options["streaming"]))
            files = str(next(tmp_path.rglob("*.json.gz")))
            return load("json", **{**options, "data_files": files, "name": None})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        documents = load_documents("c4", streaming=True)
        assert calls == [("allenai/c4" if connected else "json", True)] and documents.is_stream
        assert documents.source == "c4 (allenai/c4, split train)"
        for seed in (0, 1):
            assert list(documents.shuffled(seed)) == [f"c4 train {i}" for i in range(1200)]
