import json
import random

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from optimum_neuronal import calibration
from optimum_neuronal.calibration import (
    CALIBRATION_DATASETS,
    check_vocabulary,
    draw_sequences,
    load_documents,
    resolve_seq_length,
)


VOCAB = 256


@pytest.fixture
def tokenizer():
    """The word "w7" is the id 7, anything else 255; it warns above 4 tokens, as that is what its model admits."""
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<unk>": VOCAB - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", model_max_length=4)


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(calibration, "_connection_error", lambda hub_id: None)


def document(start, length):
    return " ".join(f"w{(start + i) % (VOCAB - 1)}" for i in range(length))


def draw(dataset, tokenizer, num_samples=4, seq_length=8, seed=0, vocab_size=VOCAB):
    return draw_sequences(
        dataset, tokenizer, num_samples=num_samples, seq_length=seq_length, seed=seed, vocab_size=vocab_size
    )


# Documents of 3 words ("short") lie between those of 20 words, which start at multiples of 20.
MIXED = [text for i in range(10) for text in (document(20 * i, 20), document(0, 3), "  ")]


class TestDocuments:
    def test_windows_lie_inside_distinct_long_documents(self, tokenizer):
        result = draw(MIXED, tokenizer, num_samples=10)
        assert result.ids.shape == (10, 8) and result.ids.dtype == torch.int64 and result.drawn_from == "documents"
        assert (result.ids.diff(dim=1) == 1).all(), "a window is consecutive words of one document"
        assert ((result.ids[:, 0] % 20) <= 12).all()
        assert sorted((result.ids[:, 0] // 20).tolist()) == list(range(10)), "every document once"

    def test_a_document_of_exactly_the_length_counts(self, tokenizer):
        result = draw([document(0, 8), document(50, 7), document(100, 8)], tokenizer, num_samples=2)
        assert sorted(result.ids[:, 0].tolist()) == [0, 100]

    def test_windows_start_anywhere(self, tokenizer):
        documents = [document(10 * i, 10) for i in range(20)]
        assert set((draw(documents, tokenizer, num_samples=20).ids[:, 0] % 10).tolist()) == {0, 1, 2}
        assert len(set(draw([document(0, 200)], tokenizer, num_samples=20).ids[:, 0].tolist())) > 10

    def test_seed_decides(self, tokenizer):
        assert torch.equal(draw(MIXED, tokenizer).ids, draw(MIXED, tokenizer).ids)
        assert not torch.equal(draw(MIXED, tokenizer).ids, draw(MIXED, tokenizer, seed=1).ids)

    def test_leaves_the_global_generators_alone(self, tokenizer):
        random.seed(3)
        expected = random.random()
        random.seed(3)
        draw(MIXED, tokenizer)
        assert random.random() == expected

    @pytest.mark.parametrize("dataset", [MIXED, [document(0, 300)]], ids=["documents", "stream"])
    def test_fewer_samples_are_a_prefix(self, tokenizer, dataset):
        whole = draw(dataset, tokenizer, num_samples=20).ids
        for num_samples in (1, 8, 12):
            assert torch.equal(draw(dataset, tokenizer, num_samples=num_samples).ids, whole[:num_samples])

    def test_long_documents_give_further_windows(self, tokenizer):
        result = draw(MIXED, tokenizer, num_samples=25)  # ten long documents of 20 tokens: exactly 25 * 8
        assert result.drawn_from == "documents" and (result.ids.diff(dim=1) == 1).all()

    def test_too_little_long_text_joins_everything(self, tokenizer):
        result = draw(MIXED, tokenizer, num_samples=26)
        assert result.drawn_from == "stream" and result.ids.shape == (26, 8)

    def test_short_documents_are_joined(self, tokenizer):
        result = draw([document(3 * i, 3) for i in range(20)], tokenizer, num_samples=7)
        assert result.drawn_from == "stream" and (result.ids.diff(dim=1) == 1).all()

    def test_silent_about_long_texts(self, tokenizer, caplog, capfd):
        draw(MIXED, tokenizer)
        assert "longer than" not in caplog.text + capfd.readouterr().err

    def test_report(self, tokenizer):
        report = draw(MIXED, tokenizer, seed=5).to_dict()
        assert json.loads(json.dumps(report)) == report
        assert report["source"] == "a list of 30 strings" and report["seed"] == 5
        assert (report["num_samples"], report["seq_length"], len(report["sha256"])) == (4, 8, 64)
        assert draw(MIXED, tokenizer, seed=6).to_dict()["sha256"] != report["sha256"]


class TestTextErrors:
    def test_too_little_text(self, tokenizer):
        with pytest.raises(
            ValueError, match=r"holds 20 tokens, but 4 sequences of 8 need 32.*num_samples to at most 2"
        ):
            draw([document(0, 20)], tokenizer)
        with pytest.raises(ValueError, match="or set seq_length to at most 5"):
            draw([document(0, 5)], tokenizer)

    @pytest.mark.parametrize("dataset, what", [([], "no documents"), (["", " \n"], "only blank documents")])
    def test_no_text(self, tokenizer, dataset, what):
        with pytest.raises(ValueError, match=what):
            draw(dataset, tokenizer)

    def test_entry_that_is_no_string(self, tokenizer):
        with pytest.raises(TypeError, match="Document 1 of a list of 3 strings is of type int"):
            draw(["text", 3, "text"], tokenizer)
        with pytest.raises(TypeError, match="Document 1 of .* is of type NoneType"):
            draw(datasets.Dataset.from_dict({"text": ["short", None]}), tokenizer)

    def test_missing_arguments(self, tokenizer):
        with pytest.raises(ValueError, match="needs a tokenizer"):
            draw(MIXED, None)
        with pytest.raises(ValueError, match="needs seq_length"):
            draw(MIXED, tokenizer, seq_length=None)
        with pytest.raises(ValueError, match="num_samples=0"):
            draw(MIXED, tokenizer, num_samples=0)

    def test_tokenizer_of_another_model(self, tokenizer):
        with pytest.raises(ValueError, match="run from 0 to 99, but the model's vocabulary has 50"):
            draw([document(0, 100)], tokenizer, num_samples=1, seq_length=100, vocab_size=50)

    def test_kinds_that_are_not_supported(self):
        with pytest.raises(TypeError, match="type dict is not supported"):
            load_documents({"text": ["a"]})
        with pytest.raises(TypeError, match="one split"):
            load_documents(datasets.DatasetDict())


class TestTokenIds:
    @pytest.mark.parametrize(
        "convert",
        [torch.tensor, lambda ids: np.array(ids, np.uint16), list, lambda ids: [torch.tensor(row) for row in ids]],
        ids=["tensor", "uint16", "lists", "tensors"],
    )
    def test_kinds(self, convert):
        ids = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        result = draw(convert(ids), None, num_samples=2, seq_length=None)
        assert result.ids.tolist() == ids[:2] and result.ids.dtype == torch.int64
        assert result.drawn_from == "token ids" and result.seed is None

    def test_array_that_cannot_be_written(self, recwarn):
        ids = np.arange(6).reshape(2, 3)
        ids.setflags(write=False)
        assert draw(ids, None, num_samples=2, seq_length=3).ids.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert not recwarn.list

    def test_too_few_or_of_another_length(self):
        with pytest.raises(ValueError, match="hold 3 sequences, but num_samples=4: set num_samples=3"):
            draw(torch.zeros(3, 8, dtype=torch.int64), None)
        with pytest.raises(ValueError, match="sequences of 9, but seq_length=8"):
            draw(torch.zeros(4, 9, dtype=torch.int64), None)

    @pytest.mark.parametrize(
        "ids",
        [
            torch.zeros(4, 8),
            torch.zeros(4, 8, dtype=torch.bool),
            torch.zeros(8, dtype=torch.int64),
            np.zeros((0, 8), int),
        ]
        + [np.zeros((4, 2, 2), int), [[1, 2], [3]], [["a", "b"]], torch.zeros(4, 8, dtype=torch.bfloat16)],
    )
    def test_not_ids(self, ids):
        with pytest.raises(ValueError, match=r"have to be integers of shape \(N, L\)"):
            draw(ids, None)

    @pytest.mark.parametrize("bad", [-1, VOCAB])
    def test_outside_the_vocabulary(self, bad):
        with pytest.raises(ValueError, match=f"vocabulary has {VOCAB} entries"):
            draw([[0, bad]], None, num_samples=1, seq_length=2)
        check_vocabulary(torch.tensor([0, VOCAB - 1]), VOCAB)


class TestFiles:
    def test_txt_is_one_stream(self, tmp_path, tokenizer):
        path = tmp_path / "book.txt"
        path.write_text(document(0, 100).replace("w50 ", "w50\n\n"))
        result = draw(path, tokenizer)
        assert result.drawn_from == "stream" and result.source == "book.txt"
        assert load_documents(str(path)).joined

    def test_jsonl(self, tmp_path):
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "a\u2028b", "code": "c"}\n\n{"text": "d", "code": "e"}\n', encoding="utf-8")
        assert list(load_documents(path)) == ["a\u2028b", "d"]
        assert list(load_documents(f"{path}:code")) == ["c", "e"]

    @pytest.mark.parametrize(
        "line, message",
        [
            ("{", "Line 2 .* is not JSON"),
            ("[1]", "no object with the key 'text', it is: list"),
            ('{"x": 1}', "keys x"),
        ],
    )
    def test_jsonl_errors(self, tmp_path, line, message):
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "a"}\n' + line)
        with pytest.raises(ValueError, match=message):
            load_documents(path)

    def test_parquet(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        path = str(tmp_path / "data.parquet")
        datasets.Dataset.from_dict({"text": ["a", "b"], "code": ["c", "d"]}).to_parquet(path)
        assert list(load_documents(path)) == ["a", "b"]
        assert list(load_documents(path + ":code")) == ["c", "d"]
        with pytest.raises(ValueError, match="no column 'nope', it has: text, code"):
            load_documents(path + ":nope")
        (tmp_path / "broken.parquet").write_text("no parquet")
        with pytest.raises(ValueError, match="could not be read as parquet"):
            load_documents(tmp_path / "broken.parquet")

    def test_wrong_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="gone.txt' does not exist"):
            load_documents(tmp_path / "gone.txt")
        with pytest.raises(FileNotFoundError, match="gone.jsonl' does not exist"):
            load_documents("gone.jsonl:code")
        with pytest.raises(ValueError, match="is a folder"):
            load_documents(tmp_path)
        for name, content, message in [("a.csv", b"a", "of an unknown kind"), ("latin.txt", b"\xe9", "not UTF-8")]:
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=message):
                load_documents(tmp_path / name)
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(ValueError, match="has no column 'code'"):
            load_documents(f"{tmp_path / 'a.txt'}:code")


class TestDataset:
    def test_column(self):
        assert list(load_documents(datasets.Dataset.from_dict({"text": ["a"], "other": ["b"]}))) == ["a"]
        assert list(load_documents(datasets.Dataset.from_dict({"body": ["a"], "year": [1]}))) == ["a"]
        with pytest.raises(ValueError, match="no column 'text', it has: one, two"):
            load_documents(datasets.Dataset.from_dict({"one": ["a"], "two": ["b"]}))

    def test_draws(self, tokenizer):
        dataset = datasets.Dataset.from_dict({"text": MIXED})
        assert torch.equal(draw(dataset, tokenizer).ids, draw(MIXED, tokenizer).ids)


PTB = {"revision": "refs/convert/parquet"}
HUB = [
    ("c4", "train", ("allenai/c4", None), {"data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}}),
    ("c4", "test", ("allenai/c4", None), {"data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"}}),
    ("wikitext2", "train", ("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "train"}),
    ("wikitext2", "test", ("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"}),
    ("ptb", "train", ("ptb-text-only/ptb_text_only", None), PTB | {"split": "train"}),
    ("ptb", "test", ("ptb-text-only/ptb_text_only", None), PTB | {"split": "test"}),
    ("me/data", "train", ("me/data", None), {"split": "train"}),
    ("me/data", "test", ("me/data", None), {"split": "test"}),
    ("me/data:dev", "test", ("me/data", None), {"split": "dev"}),
    ("me/data:dev:sentence", "train", ("me/data", None), {"split": "dev"}),
    ("me/data:en:dev:sentence", "train", ("me/data", "en"), {"split": "dev"}),
]


class TestHub:
    @pytest.fixture
    def calls(self, monkeypatch, online):
        calls = []

        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            texts = [f"document {i}" for i in range(1200)]
            return datasets.Dataset.from_dict({"text": texts, "sentence": texts[::-1]})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    @pytest.mark.parametrize("name, role, args, kwargs", HUB)
    def test_what_is_loaded(self, calls, name, role, args, kwargs):
        documents = load_documents(name, role)
        if name == "ptb":
            kwargs = kwargs | {"data_files": {role: f"penn_treebank/{role}/0000.parquet"}}
        split = next(iter(kwargs["data_files"])) if name == "c4" else kwargs["split"]
        assert calls == [(args, {"data_files": None, "revision": None, "split": split} | kwargs)]
        assert documents[0] == ("document 1199" if "sentence" in name or name == "ptb" else "document 0")
        assert name in documents.source and f"split {split}" in documents.source

    def test_how_it_is_used(self, calls):
        c4, wikitext2, ptb = (load_documents(name, "test") for name in CALIBRATION_DATASETS)
        assert (len(c4), c4.max_windows, c4.separator, c4.joined) == (1100, 256, " ", False)
        assert (len(wikitext2), wikitext2.max_windows, wikitext2.separator, wikitext2.joined) == (
            1200,
            None,
            "\n\n",
            True,
        )
        assert (len(ptb), ptb.max_windows, ptb.separator, ptb.joined) == (1200, None, " ", True)
        assert len(load_documents("c4")) == 1200 and load_documents("c4").max_windows is None

    def test_a_local_file_wins(self, calls, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "me").mkdir()
        (tmp_path / "me" / "data.txt").write_text("local")
        assert list(load_documents("me/data.txt")) == ["local"] and not calls

    @pytest.mark.parametrize("name", ["wikitext", "WikiText2", "C4", "wikitxt2:train"])
    def test_did_you_mean(self, calls, name):
        with pytest.raises(ValueError, match=r"Did you mean '(wikitext2|c4)'\?"):
            load_documents(name)
        assert not calls

    @pytest.mark.parametrize("name", ["", "some text to use", "a/b/c", "me/data:", "me/data:a:b:c:d", "me/data::text"])
    def test_neither_name_nor_file_nor_id(self, calls, name):
        with pytest.raises(ValueError, match="neither a known name .*put it in a list"):
            load_documents(name)
        assert not calls

    def test_refused_by_the_hub(self, monkeypatch, online):
        def load_dataset(*args, **kwargs):
            raise ValueError('Unknown split "dev". Should be one of\n["train"].')

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(RuntimeError, match=r"'me/data:dev' .*Unknown split.*\. Pass a local \.txt") as caught:
            load_documents("me/data:dev")
        assert isinstance(caught.value.__cause__, ValueError) and "\n" not in str(caught.value)

    def test_offline(self, monkeypatch, tmp_path):
        failure = OSError("Name or service not known")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
        monkeypatch.setattr(calibration, "_connection_error", lambda hub_id: failure)
        before = datasets.config.HF_HUB_OFFLINE
        with pytest.raises(
            RuntimeError, match=r"no connection to the Hub \(Name .*a list of strings, or token"
        ) as caught:
            load_documents("wikitext2")
        assert caught.value.__cause__ is failure and datasets.config.HF_HUB_OFFLINE is before

    def test_offline_uses_what_was_loaded_before(self, monkeypatch):
        def load_dataset(*args, **kwargs):
            assert datasets.config.HF_HUB_OFFLINE, "datasets looks in its cache, and does not retry the network"
            return datasets.Dataset.from_dict({"text": ["a", "b"]})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(calibration, "_connection_error", lambda hub_id: OSError("unreachable"))
        assert list(load_documents("me/data")) == ["a", "b"]
        assert not datasets.config.HF_HUB_OFFLINE

    def test_connection_is_tried_once(self, monkeypatch):
        import huggingface_hub

        def dataset_info(self, hub_id, timeout):
            assert hub_id == "me/data" and timeout <= 10
            raise answer

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        answer = ConnectionError("unreachable")
        assert calibration._connection_error("me/data") is answer
        answer = huggingface_hub.errors.HfHubHTTPError.__new__(huggingface_hub.errors.HfHubHTTPError)
        assert calibration._connection_error("me/data") is None


def test_resolve_seq_length():
    assert resolve_seq_length(LlamaConfig(max_position_embeddings=4096)) == 2048
    assert resolve_seq_length(LlamaConfig(max_position_embeddings=512)) == 512
    assert resolve_seq_length(GPT2Config(n_positions=1024)) == 1024
    assert resolve_seq_length(LlamaConfig(max_position_embeddings=4096), 4096) == 4096
    for bad in (0, 513):
        with pytest.raises(ValueError, match=f"seq_length={bad}, but this model admits 1 to 512"):
            resolve_seq_length(LlamaConfig(max_position_embeddings=512), bad)
