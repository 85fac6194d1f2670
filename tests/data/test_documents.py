import datasets
import pytest
import torch
from texts import MIXED, document, draw

from optimum_neuronal.data.documents import CALIBRATION_DATASETS, find_dataset, load_documents


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_column_of_a_dataset(tokenizer):
    for columns in ({"text": ["a"], "other": ["b"]}, {"body": ["a"], "year": [1]}):
        assert list(load_documents(datasets.Dataset.from_dict(columns))) == ["a"]
    with pytest.raises(ValueError, match="no column 'text', only one, two"):
        load_documents(datasets.Dataset.from_dict({"one": ["a"], "two": ["b"]}))
    with pytest.raises(TypeError, match="type DatasetDict is not supported.*one split"):
        load_documents(datasets.DatasetDict())
    dataset = datasets.Dataset.from_dict({"text": MIXED})
    assert torch.equal(draw(dataset, tokenizer).ids, draw(MIXED, tokenizer).ids)


def test_txt_is_one_stream(tmp_path, tokenizer):
    path, text = tmp_path / "book.txt", document(0, 100).replace("w50 ", "w50\n\n")
    path.write_text("\ufeff" + text, encoding="utf-8")
    result = draw(path, tokenizer)
    assert result.drawn_from == "stream" and result.source == "book.txt"
    assert load_documents(str(path)).joined and list(load_documents(path)) == [text]


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{', "Could not load the dataset a.jsonl: JSON parse error"),
        ("a.jsonl", '{"text": "a"}\n{"x": "1"}', "Document 1 of a.jsonl is a NoneType: expected a string"),
        ("a.jsonl", '{"id": "1", "content": "2"}', "a.jsonl. has no column 'text', only id, content"),
        ("a.csv", "text\n1\n2\n", "Document 0 of a.csv is a int"),
        ("a.parquet", "no parquet", "Could not load the dataset a.parquet"),
        ("a.txt", " ", "a.txt. holds no text"),
        ("a.docx", "a", "does not exist, or does not end in .txt, .csv"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError), match=message):
        load_documents(str(tmp_path / name)).join()


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


C4 = {"train": "en/c4-train.00000-of-01024.json.gz", "validation": "en/c4-validation.00000-of-00008.json.gz"}
PTB = {split: f"penn_treebank/{split}/0000.parquet" for split in ("train", "test")}
HUB = [
    ("c4", "train", ("allenai/c4", None), "train", C4),
    ("c4", "test", ("allenai/c4", None), "validation", C4),
    ("wikitext2", "test", ("Salesforce/wikitext", "wikitext-2-raw-v1"), "test", {}),
    ("ptb", "train", ("ptb-text-only/ptb_text_only", None), "train", PTB),
    ("me/data", "test", ("me/data", None), "test", {}),
    ("me/data:dev", "test", ("me/data", None), "dev", {}),
    ("me/data:dev:sentence", "train", ("me/data", None), "dev", {}),
    ("me/data:en:dev:sentence", "train", ("me/data", "en"), "dev", {}),
]


class TestHub:
    @pytest.fixture
    def calls(self, monkeypatch):
        calls = []

        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            texts = [f"document {i}" for i in range(1200)]
            return datasets.Dataset.from_dict({"text": texts, "sentence": texts[::-1]})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    @pytest.mark.parametrize(("name", "role", "args", "split", "files"), HUB)
    def test_what_is_loaded(self, calls, name, role, args, split, files):
        documents = load_documents(name, role)
        data_files = {split: files[split]} if files else None
        revision = "refs/convert/parquet" if name == "ptb" else None
        assert calls == [(args, {"data_files": data_files, "revision": revision, "split": split})]
        assert documents[0] == ("document 1199" if "sentence" in name or name == "ptb" else "document 0")
        assert name in documents.source and f"split {split}" in documents.source

    def test_how_it_is_used(self, calls):
        c4, wikitext2, ptb = (load_documents(name, "test") for name in CALIBRATION_DATASETS)
        assert (len(c4), c4.max_windows, c4.separator, c4.joined) == (1100, 256, " ", False)
        found = (len(wikitext2), wikitext2.max_windows, wikitext2.separator, wikitext2.joined)
        assert found == (1200, None, "\n\n", True)
        assert (len(ptb), ptb.max_windows, ptb.separator, ptb.joined) == (1200, None, " ", True)
        assert len(load_documents("c4")) == 1200 and load_documents("c4").max_windows is None

    def test_the_hubs_error_is_one_line(self, monkeypatch):
        def load_dataset(*args, **kwargs):
            raise ValueError('Unknown split "dev". Should be one of\n["train"].')

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(RuntimeError, match=r"me/data:dev .*Unknown split.*\. Pass a local \.txt") as caught:
            load_documents("me/data:dev")
        assert isinstance(caught.value.__cause__, ValueError) and "\n" not in str(caught.value)
