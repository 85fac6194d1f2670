"""Without a connection; with one, see test_publishing."""

import pytest
from conftest import make_model
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from optimum_neuronal.checkpoint.hub import HTTPError, check_push, public_name
from optimum_neuronal.checkpoint.sparsity_config import hub_id


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.mark.parametrize(
    "origin, on_the_hub, name",
    [
        ("meta/llama", "meta/llama", "meta/llama"),
        ("gpt2", "gpt2", "gpt2"),
        ("", None, "LlamaForCausalLM"),
        ("a/b/c", None, "c"),
        ("/gone/dense", None, "dense"),
        ("./dense", None, "dense"),
        ("../my dense/", None, "my dense"),
    ],
)
def test_names_hold_no_folder(model, origin, on_the_hub, name):
    model.config._name_or_path = origin
    assert (hub_id(model), public_name(model)) == (on_the_hub, name)


def test_what_lies_here_is_not_on_the_hub(model, tmp_path, monkeypatch):
    (tmp_path / "own" / "dense").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "own")
    for origin, name in (("dense", "dense"), (".", "own"), (str(tmp_path / "own" / "dense"), "dense")):
        model.config._name_or_path = origin
        assert (hub_id(model), public_name(model)) == (None, name)


@pytest.mark.parametrize("folder, repository", [("models--meta--llama-3", "meta/llama-3"), ("models--gpt2", "gpt2")])
def test_a_snapshot_of_the_cache_is_on_the_hub(model, folder, repository, tmp_path):
    snapshot = tmp_path / folder / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    model.config._name_or_path = str(snapshot)
    assert hub_id(model) == public_name(model) == repository


def test_a_hub_that_cannot_be_reached(monkeypatch):
    """Whatever the library under the Hub's client raises, it is one sentence."""
    for failure in (HTTPError("[Errno 111] Connection refused"), OfflineModeIsEnabled("offline")):

        def fail(self, failure=failure):
            raise failure

        monkeypatch.setattr(HfApi, "whoami", fail)
        with pytest.raises(
            ConnectionError, match="'me/llama' cannot be published, because the Hub cannot be reached: "
        ):
            check_push("me/llama")
    assert issubclass(HfHubHTTPError, HTTPError) and HTTPError is not OSError
