import datasets
import pytest
from huggingface_hub import HfApi

from optimum_neuronal.data import hub_datasets
from optimum_neuronal.data.documents import check_dataset, load_documents
from optimum_neuronal.data.hub_datasets import CALIBRATION_DATASETS


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(hub_datasets, "connection_error", lambda hub_id: None)


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

    def test_what_is_loaded(self, calls):
        for name, role, args, kwargs in HUB:
            documents = load_documents(name, role)
            if name == "ptb":
                kwargs = kwargs | {"data_files": {role: f"penn_treebank/{role}/0000.parquet"}}
            split = next(iter(kwargs["data_files"])) if name == "c4" else kwargs["split"]
            assert calls == [(args, {"data_files": None, "revision": None, "split": split} | kwargs)], name
            assert documents[0] == ("document 1199" if "sentence" in name or name == "ptb" else "document 0")
            assert name in documents.source and f"split {split}" in documents.source
            calls.clear()

    def test_how_it_is_used(self, calls):
        c4, wikitext2, ptb = (load_documents(name, "test") for name in CALIBRATION_DATASETS)
        assert (len(c4), c4.max_windows, c4.separator, c4.joined) == (1100, 256, " ", False)
        found = len(wikitext2), wikitext2.max_windows, wikitext2.separator, wikitext2.joined
        assert found == (1200, None, "\n\n", True)
        assert (len(ptb), ptb.max_windows, ptb.separator, ptb.joined) == (1200, None, " ", True)
        assert len(load_documents("c4")) == 1200 and load_documents("c4").max_windows is None

    def test_a_local_file_wins(self, calls, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "me").mkdir()
        (tmp_path / "me" / "data.txt").write_text("local")
        assert list(load_documents("me/data.txt")) == ["local"] and not calls

    def test_names_that_mean_nothing(self, calls):
        for name in ("wikitext", "WikiText2", "C4", "wikitxt2:train"):
            with pytest.raises(ValueError, match=r"Did you mean '(wikitext2|c4)'\?"):
                load_documents(name)
        for name in ("", "some text to use", "a/b/c", "me/data:", "me/data:a:b:c:d", "me/data::text"):
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
        monkeypatch.setattr(hub_datasets, "connection_error", lambda hub_id: failure)
        before = datasets.config.HF_HUB_OFFLINE
        message = r"no connection to the Hub \(Name .*a list of strings, or token"
        with pytest.raises(RuntimeError, match=message) as caught:
            load_documents("wikitext2")
        assert caught.value.__cause__ is failure and datasets.config.HF_HUB_OFFLINE is before

    def test_offline_uses_what_was_loaded_before(self, monkeypatch):
        def load_dataset(*args, **kwargs):
            assert datasets.config.HF_HUB_OFFLINE, "datasets looks in its cache, and does not retry the network"
            return datasets.Dataset.from_dict({"text": ["a", "b"]})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_datasets, "connection_error", lambda hub_id: OSError("unreachable"))
        assert list(load_documents("me/data")) == ["a", "b"]
        assert not datasets.config.HF_HUB_OFFLINE

    def test_connection_is_tried_once(self, monkeypatch):
        import huggingface_hub

        def dataset_info(self, hub_id, timeout):
            assert hub_id == "me/data" and timeout <= 10
            raise answer

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        answer = ConnectionError("unreachable")
        assert hub_datasets.connection_error("me/data") is answer
        answer = huggingface_hub.errors.HfHubHTTPError.__new__(huggingface_hub.errors.HfHubHTTPError)
        assert hub_datasets.connection_error("me/data") is None


def test_checking_asks_the_hub_or_without_a_connection_the_cache(monkeypatch):
    loaded, asked, connection = [], [], OSError("unreachable")

    def load_dataset(*args, **kwargs):
        loaded.append((args, kwargs["split"], datasets.config.HF_HUB_OFFLINE))
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(HfApi, "auth_check", lambda self, hub_id, repo_type: asked.append((hub_id, repo_type)))
    monkeypatch.setattr(hub_datasets, "connection_error", lambda hub_id: connection)
    check_dataset("c4", "test")
    assert loaded == [(("allenai/c4", None), "validation", True)] and not asked
    connection = None
    check_dataset("c4", "test")
    assert len(loaded) == 1 and asked == [("allenai/c4", "dataset")]
