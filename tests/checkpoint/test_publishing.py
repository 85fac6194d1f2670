"""Models go to the Hub and come back, against a stand-in for it."""

import json

import pytest
from conftest import make_model, make_tokenizer
from hub_standin import Hub
from huggingface_hub.errors import LocalTokenNotFoundError
from sparse_checkpoints import same, tensors_of

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, inspect_checkpoint
from optimum_neuronal.checkpoint.hub import check_push, find_checkpoint
from optimum_neuronal.model.load_model import load_model


WRITTEN = {
    "config.json", "generation_config.json", "model.safetensors", "neuronal_report.json", "README.md", "tokenizer.json",
    "tokenizer_config.json", "modules.json", ".gitattributes",
}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub", monkeypatch)
    card = b"---\nlicense: llama3\nlanguage:\n- en\n---\n\n# Dense\n"
    hub.repositories["me/dense-llama"] = {"main": {"README.md": card, "modules.json": b"[]", "config.json": b"{}"}}
    return hub


def pruned(sparsity=0.7):
    model = make_model("llama", vocab_size=256)
    model.config._name_or_path = "me/dense-llama"
    pruner = NeuronALPruner(NeuronALConfig(sparsity, saliency="magnitude", topup="uniform"), make_tokenizer())
    return pruner, pruner.prune(model)


def reloads(model, repo_id, revision=None):
    return same(load_model(find_checkpoint(repo_id, revision)).state_dict(), model.state_dict())


def test_push_and_back(hub):
    pruner, model = pruned()
    assert pruner.push_to_hub(model, "me/llama-70", private=True) == "https://hub/me/llama-70/commit/1"
    assert hub.private["me/llama-70"] and hub.files("me/llama-70").keys() == WRITTEN and reloads(model, "me/llama-70")
    found = inspect_checkpoint("me/llama-70")
    assert not found.problems and found.total.sparsity == pruner.report.achieved_sparsity
    card = hub.files("me/llama-70")["README.md"].decode()
    assert "license: llama3" in card and "# me/llama-70" in card, "the license is that of the dense model's card"
    assert json.loads(hub.files("me/llama-70")["neuronal_report.json"])["config"]["sparsity"] == 0.7


def test_shards_of_any_name_are_downloaded(hub):
    """Such as those of Qwen3.5."""
    hub.repositories["me/model"] = {"main": {"model.safetensors-00001-of-00002.safetensors": b"", "other.bin": b""}}
    assert [file.name for file in find_checkpoint("me/model").iterdir()] == [*hub.files("me/model")][:1]


def test_a_push_makes_the_branch_equal_to_the_saved_directory(hub, tmp_path):
    """In one commit, and only on request if it holds files; a new branch leaves main as it was."""
    (first_pruner, first), (pruner, model) = pruned(), pruned(0.5)
    first_pruner.push_to_hub(first, "model", format="packed", commit_message="Packed")
    assert inspect_checkpoint("me/model").format == "packed"
    converted = convert_checkpoint("me/model", "dense", tmp_path / "converted")
    assert same(tensors_of(converted), first.state_dict()) and (converted / "tokenizer.json").exists()
    hub.files("me/model")["notes/mine.txt"] = b"mine"
    pruner.push_to_hub(model, "me/model", commit_message="Dense now", overwrite=True, private=True)
    assert hub.private["me/model"], "which was public"
    assert hub.commits == ["Packed", "Dense now"]
    assert hub.files("me/model").keys() == WRITTEN and reloads(model, "me/model")
    first_pruner.push_to_hub(first, "me/model", revision="trial", overwrite=True)
    assert hub.files("me/model", "trial").keys() == WRITTEN
    assert reloads(first, "me/model", "trial") and reloads(model, "me/model")


def test_nothing_is_replaced_unasked(hub):
    pruner, model = pruned()
    pruner.push_to_hub(model, "me/model")
    before = dict(hub.files("me/model"))
    said = r"'me/model' holds 8 files: choose a new one, or pass --overwrite \(overwrite=True\)"
    for attempt in (lambda: check_push("model"), lambda: pruner.push_to_hub(model, "me/model", private=True)):
        with pytest.raises(FileExistsError, match=said):
            attempt()
    assert not hub.private["me/model"]
    with pytest.raises(FileExistsError, match="'me/dense-llama' holds 3 files: choose"):
        check_push("me/dense-llama")
    check_push("me/model", overwrite=True)
    assert hub.files("me/model") == before and hub.commits == ["Upload pruned model"]


def test_whether_a_model_can_be_published_is_known_before_it_is_made(hub):
    check_push("fresh")
    check_push("lab/fresh")
    for repo_id, token, message in [
        ("else/fresh", None, r"can only create repositories of lab, me\."),
        ("library/fresh", None, r"can only create repositories of lab, me\."),
        ("me/x", "hf_read", r"token may not write to 'me/x': log in with `hf auth login`, or set HF_TOKEN"),
    ]:
        with pytest.raises(PermissionError, match=message):
            check_push(repo_id, token)
    with pytest.raises(ValueError, match="'not/an/id'"):
        check_push("not/an/id")
    assert hub.repositories.keys() == {"me/dense-llama"}


def test_without_a_token_a_model_or_a_connection(hub, monkeypatch):
    hub.token = None
    pruner, model = pruned()
    attempts = (lambda: check_push("me/model"), lambda: pruner.push_to_hub(model, "me/model"))
    for attempt in attempts:
        with pytest.raises(LocalTokenNotFoundError):
            attempt()
    with pytest.raises(OSError, match="could not be downloaded from the Hub"):
        inspect_checkpoint("me/absent")
    monkeypatch.setattr("optimum_neuronal.checkpoint.hub.is_connected", lambda: False)
    for attempt in attempts:
        with pytest.raises(ConnectionError, match="cannot be reached: check the network"):
            attempt()
