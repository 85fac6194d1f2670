import itertools
import json

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from texts import MIXED, document, draw

from optimum_neuronal.data import documents as module
from optimum_neuronal.data.calibration import as_token_ids
from optimum_neuronal.data.documents import CALIBRATION_DATASETS, find_dataset, iterate_documents, load_documents


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_column_of_a_dataset(tokenizer):
    for columns in ({"text": ["a"], "other": ["b"]}, {"body": ["a"], "year": [1]}):
        assert list(load_documents(datasets.Dataset.from_dict(columns))) == ["a"]
    with pytest.raises(
        ValueError, match=r"no column 'text' or .*'completion', only one, two. Pass one of them: dataset\['one'\]"
    ):
        load_documents(datasets.Dataset.from_dict({"one": ["a"], "two": ["b"]}))
    with pytest.raises(ValueError, match="no column 'text' or .*, only none"):
        load_documents(datasets.Dataset.from_dict({}))
    with pytest.raises(TypeError, match="type DatasetDict is not supported.*one split.*a column of it"):
        load_documents(datasets.DatasetDict())
    dataset = datasets.Dataset.from_dict({"text": MIXED, "prompt": MIXED})
    for given in (dataset, dataset["prompt"], dataset.select(range(len(MIXED)))["text"]):
        assert torch.equal(draw(given, tokenizer).ids, draw(MIXED, tokenizer).ids)


def test_an_array_of_text_is_not_token_ids(tokenizer):
    assert as_token_ids(np.array(["a text"])) is None
    with pytest.raises(TypeError, match="of type ndarray is not supported. Pass .* a list of strings"):
        draw(np.array(["a text"]), tokenizer)


@pytest.mark.parametrize("seed", range(4))
def test_nulls_count_as_empty_with_one_note_whatever_the_seed(seed, tokenizer, caplog, tmp_path):
    texts = [None, *MIXED, None]
    dataset = datasets.Dataset.from_dict({"text": texts}).shuffle(seed=seed)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for given in (dataset, dataset["text"], texts, tmp_path / "a.jsonl"):
        caplog.clear()
        draw(given, tokenizer, seed=seed)
        (note,) = caplog.messages
        assert note.startswith(f"2 of {len(texts)} documents of ") and note.endswith(" are null: they count as empty.")
    expected = draw(["", *MIXED, ""], tokenizer, seed=seed).ids
    assert torch.equal(draw(texts, tokenizer, seed=seed).ids, expected)
    for nothing in ([None, None], datasets.Dataset.from_dict({"text": [None, None]})):
        with pytest.raises(ValueError, match="holds no text"):
            load_documents(nothing)


def test_txt_is_one_stream(tmp_path, tokenizer):
    path, text = tmp_path / "book.txt", document(0, 100).replace("w50 ", "w50\n\n")
    path.write_text("\ufeff" + text, encoding="utf-8")
    result = draw(path, tokenizer)
    assert result.drawn_from == "stream" and result.source == "book.txt"
    assert load_documents(str(path)).joined and list(load_documents(path)) == [text]
    path.rename(tmp_path / "wiki.test.RAW")
    assert list(load_documents(tmp_path / "wiki.test.RAW")) == [text]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a\u2028b", "code": "c"}\n\n{"text": "NA", "code": "d"}\n'),
        ("a.json", '[{"text": "a\u2028b", "code": "c"}, {"text": "NA", "code": "d"}]'),
        ("a[1].csv", "text,code\na\u2028b,c\nNA,d\n"),
    ],
)
def test_files_with_columns(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert list(load_documents(tmp_path / name)) == ["a\u2028b", "NA"]
    assert list(load_documents(f"{tmp_path / name}:code")) == ["c", "d"]
    assert load_documents(tmp_path / name).source == name


def test_null_inside_a_row_is_no_null_row(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "a", "tags": [None]}, indent=2))
    assert list(load_documents(tmp_path / "a.json")) == ["a"]


def test_folders(tmp_path):
    for folder in ("texts/more", "splits"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("one\ntwo")
    (tmp_path / "texts" / "more" / "b.txt").write_text("three\n\nfour")
    documents = load_documents(tmp_path / "texts")
    assert list(documents) == ["one\ntwo", "three\n\nfour"] and not documents.joined
    (tmp_path / "splits" / "train.jsonl").write_text('{"text": "a", "code": "c"}\n')
    assert list(load_documents(tmp_path / "splits", "test")) == ["a"], "the only split"
    (tmp_path / "splits" / "test.jsonl").write_text('{"text": "b", "code": "d"}\n')
    assert list(load_documents(tmp_path / "splits", "test")) == ["b"]
    assert list(load_documents(f"{tmp_path / 'splits'}:code")) == ["c"]
    (tmp_path / "splits" / "test.jsonl").rename(tmp_path / "splits" / "validation.jsonl")
    assert list(load_documents(tmp_path / "splits", "test")) == ["b"], "instead of the text to train with"
    (tmp_path / "splits" / "train.jsonl").rename(tmp_path / "splits" / "test.jsonl")
    with pytest.raises(RuntimeError, match="it has the splits validation, test: expected train"):
        load_documents(tmp_path / "splits")
    (tmp_path / "splits" / "validation.jsonl").unlink()
    assert list(load_documents(tmp_path / "splits")) == ["a"], "the only split"
    (tmp_path / "splits" / "test.csv").write_text("text\nc\n")
    with pytest.raises(ValueError, match=r"files of several kinds \(.csv, .jsonl\)"):
        load_documents(tmp_path / "splits")
    (tmp_path / "splits" / "test.csv").rename(tmp_path / "away.csv")
    (tmp_path / "splits" / "README.md").write_text("about it")
    assert list(load_documents(tmp_path / "splits", "test")) == ["a"]
    (tmp_path / "splits" / "LICENSE.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"files of several kinds \(.jsonl, .txt\): name a file"):
        load_documents(tmp_path / "splits")


@pytest.mark.parametrize("name", ["a.raw", "a.TXT", "notes.md"])
def test_folders_of_other_texts(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="has no file that ends in .txt"):
        load_documents(tmp_path)
    (tmp_path / name).write_text("one")
    (tmp_path / "README.md").write_text("about it")
    assert list(load_documents(tmp_path)) == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{', "Could not load the dataset a.jsonl: JSON parse error"),
        ("a.jsonl", '{"id": "1", "content": "2"}', "a.jsonl. has no column 'text' or .*, only id, content. Name one"),
        ("a.json", "\ufeff\n null", "a.json holds null in place of a row"),
        ("a.jsonl", '{"text": "a"}\n null\n', "a.jsonl holds null in place of a row"),
        ("a.json", '[null, {"text": "a"}]', "a.json holds null in place of a row"),
        ("a.csv", "text\n1\n2\n", "Document 0 of a.csv is a int"),
        ("a.parquet", "no parquet", "Could not load the dataset a.parquet"),
        ("a.txt", " ", "a.txt. holds no text"),
        ("a.docx", "a", "does not exist, or does not end in .txt, .text"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError), match=message):
        load_documents(str(tmp_path / name)).join()


def test_a_long_reason_is_not_cut_in_a_word(tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise ValueError("several words " * 40)

    (tmp_path / "a.jsonl").touch()
    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(RuntimeError, match=r" (several|words) \[\.\.\.\]\. Pass "):
        load_documents(str(tmp_path / "a.jsonl"))


def test_text_has_no_columns(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(ValueError, match="is text, which has no columns: leave out ':code'"):
            find_dataset(f"{path}:code")


def test_names_that_mean_nothing(tmp_path):
    for name in (str(tmp_path / "gone.txt"), "gone.jsonl:code", "./gone"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            find_dataset(name)
    for name in ("wikitext", "WikiText2", "C4", "wikitxt2:train"):
        with pytest.raises(ValueError, match=r"Did you mean '(wikitext2|c4)'\?"):
            find_dataset(name)
    for name in ("", "some text to use", "a/b/c", "me/data:", "me/data:a:b:c:d", "me/data::text"):
        with pytest.raises(ValueError, match="is not a known name .*put it in a list"):
            find_dataset(name)


NAMED = [(name, role) for name in CALIBRATION_DATASETS for role in ("train", "test")]
HUB = [
    ("me/data", "test", ("me/data", None), "test"),
    ("me/data:dev", "test", ("me/data", None), "dev"),
    ("me/data:dev:sentence", "train", ("me/data", None), "dev"),
    ("me/data:en:dev:sentence", "train", ("me/data", "en"), "dev"),
]


def put_in_cache(folder, name, path):
    """Write a file of a named dataset where huggingface_hub keeps what was downloaded."""
    dataset, texts = CALIBRATION_DATASETS[name], [f"{name} {path} {i}" for i in range(1200)]
    repository = folder / f"datasets--{dataset.path.replace('/', '--')}"
    for made in (reference := repository / "refs" / (dataset.revision or "main"), repository / "snapshots" / "abc"):
        made.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text("abc")
    file = repository / "snapshots" / "abc" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = datasets.Dataset.from_dict({dataset.column or "text": texts, "timestamp": ["x"] * len(texts)})
    rows.to_parquet(file) if file.suffix == ".parquet" else rows.to_json(file, compression="gzip")


class TestHub:
    @pytest.mark.parametrize(("name", "role"), NAMED)
    def test_named_datasets_are_read_from_the_cache_without_a_connection(self, tmp_path, monkeypatch, name, role):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path)
        dataset = CALIBRATION_DATASETS[name]
        path = dataset.files[role == "test"]
        put_in_cache(tmp_path, name, path)
        documents = load_documents(name, role)
        assert documents[0] == f"{name} {path} 0"
        assert documents.source == f"{name} ({dataset.path}, split {dataset.splits[role == 'test']})"
        is_test_of_c4 = (name, role) == ("c4", "test")
        assert (len(documents), documents.max_windows) == ((1100, 256) if is_test_of_c4 else (1200, None))
        assert documents.joined == (name != "c4") and documents.separator == ("\n\n" if name == "wikitext2" else " ")

    def test_without_cache_and_connection_an_error_comes_at_once(self, tmp_path, monkeypatch):
        """huggingface_hub's own retries sleep."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setattr("time.sleep", None)
        for name in ("c4", "me/data"):
            with pytest.raises(RuntimeError, match="http://127.0.0.1:1 cannot be reached: .* set HF_HUB_OFFLINE=1"):
                load_documents(name)

    @pytest.mark.parametrize(("name", "role", "args", "split"), HUB)
    def test_what_is_loaded(self, monkeypatch, name, role, args, split):
        calls, columns = [], {"text": ["first", "last"], "sentence": ["last", "first"]}
        data = datasets.Dataset.from_dict(columns)
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or data)
        documents = load_documents(name, role)
        assert calls == [(args, {"data_files": None, "split": split})]
        assert documents[0] == ("last" if "sentence" in name else "first")
        assert name in documents.source and f"split {split}" in documents.source

    def test_the_hubs_error_is_one_line(self, monkeypatch):
        def load_dataset(*args, **kwargs):
            raise ValueError('Unknown split "dev". Should be one of\n["train"].' + " word" * 100)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(RuntimeError, match=r"me/data:dev .*Unknown split.* word \[...\]. Pass") as caught:
            load_documents("me/data:dev")
        assert isinstance(caught.value.__cause__, ValueError) and "\n" not in str(caught.value)


def test_text_in_another_encoding_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text .* at byte 3"):
        load_documents(str(tmp_path / "latin.txt"), "test")


def endless(start=0):
    for i in itertools.count(start):
        yield {"id": i, "text": f"w{i}" if i % 2 else None}


def test_streams(tokenizer, monkeypatch, caplog):
    """Of a stream without an end, the first documents are read."""
    monkeypatch.setattr(module, "STREAM_DOCUMENTS", 6)
    stream = datasets.IterableDataset.from_generator(endless)
    for split in ("train", "test"):
        documents = load_documents(stream, split)
        assert list(documents) == ["", "w1", "", "w3", "", "w5"]
        assert documents.source == "the first 6 documents of a datasets.IterableDataset"
    assert draw(stream, tokenizer, num_samples=1, seq_length=3).ids.tolist() == [[1, 3, 5]]
    with pytest.raises(ValueError, match=r"only id, body. Rename one: dataset.rename_column\('id', 'text'\)"):
        load_documents(stream.rename_column("text", "body").map(lambda row: {**row, "body": [1]}))
    with pytest.raises(ValueError, match="holds no text"):
        load_documents(stream.take(1))


class TestTrainingText:
    def test_each_document_once_in_an_order_that_the_seed_decides(self):
        texts = [f"w{i}" for i in range(20)]
        found = iterate_documents([*texts, "", None], 3)
        assert (found.source, found.rendered) == ("a list of 22 strings", False)
        order = list(found.texts)
        assert sorted(order) == sorted(texts) and order != texts
        assert list(iterate_documents([*texts, "", None], 3).texts) == order
        assert list(iterate_documents([*texts, "", None], 4).texts) != order
        dataset = datasets.Dataset.from_dict({"text": [*texts, "", None]})
        assert list(iterate_documents(dataset, 3).texts) == order

    def test_lines_are_one_text_and_streams_keep_their_order(self, tmp_path):
        (tmp_path / "a.txt").write_text("one\n\ntwo")
        assert list(iterate_documents(tmp_path / "a.txt", 0).texts) == ["one\n\ntwo"]
        found = iterate_documents(datasets.IterableDataset.from_generator(endless), 0)
        assert list(itertools.islice(found.texts, 200)) == [f"w{i}" for i in range(1, 400, 2)]
        assert found.source == "a datasets.IterableDataset"

    def test_c4_goes_on_with_its_next_file(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path)
        files = [f"en/c4-train.{number:05}-of-01024.json.gz" for number in (0, 1)]
        for file in files:
            put_in_cache(tmp_path, "c4", file)
        found = iterate_documents("c4", 0)
        assert found.source == "c4 (allenai/c4, split train)" and not caplog.messages
        texts = list(found.texts)
        for number, file in enumerate(files):
            part = texts[1200 * number : 1200 * (number + 1)]
            assert sorted(part) == sorted(f"c4 {file} {i}" for i in range(1200)) and part[0] != f"c4 {file} 0"
        assert len(texts) == 2400
        (note,) = caplog.messages
        assert note.startswith("The text of c4 ends after 2 of 1024 files. Could not load the dataset c4 (")
