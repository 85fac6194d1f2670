"""Against a stand-in for the Hub on loopback. One process runs hub_session.py; the tests check its outcome."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hub_standin import Repository, serve


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """What came out, by name, and the stand-in afterwards."""
    folder = tmp_path_factory.mktemp("hub")
    with serve() as hub:
        card = b"---\nlicense: llama3\nlanguage:\n- en\n---\n\n# Dense\n"
        hub.repositories["me/dense-llama"] = Repository(files={"README.md": (card, None)})
        environment = {**hub.environment(folder / "home"), "OMP_NUM_THREADS": "1"}
        script = Path(__file__).parents[1] / "hub_session.py"
        command = [sys.executable, script, folder / "outcome.json"]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr[-3000:]
        yield json.loads((folder / "outcome.json").read_text()), hub


def test_push_and_back(session):
    outcome, hub = session
    repository = hub.repositories["me/llama-70"]
    assert outcome["reloaded"] and repository.private and outcome["inspected"] == [True, [], True]
    assert outcome["url"].startswith(f"{hub.url}/me/llama-70/commit/")
    names = {"config.json", "model.safetensors", "neuronal_report.json", "README.md", "tokenizer.json"}
    assert names <= set(repository.files)
    card = repository.files["README.md"][0].decode()
    assert "license: llama3" in card, "inherited from the dense model's card"
    assert "8 sequences of 8 tokens of\na list of 1 strings, drawn with seed 3" in card
    report = json.loads(repository.files["neuronal_report.json"][0])
    assert report["calibration"]["seed"] == 3 and report["evaluation"]["wikitext2"]["pruned"] == 23.4567
    assert outcome["by transformers"]


def test_packed(session):
    """It loads packed by its id. Transformers' own `push_to_hub` writes dense weights."""
    outcome, hub = session
    assert outcome["packed modules"] == 21 and outcome["packed inspected"] == "packed" and "hf_other" in hub.tokens
    assert outcome["packed modules pushed"]
    assert not any(name.startswith("packed") for name in hub.repositories["me/pushed-packed"].files)
    same, names = outcome["converted"]
    assert same and {"model.safetensors", "tokenizer.json", "neuronal_report.json"} <= set(names)


def test_a_saved_folder_is_published_by_hf_upload(session):
    assert session[0]["uploaded"] == [True, 21]


def test_a_push_again_leaves_nothing_of_the_old_model(session):
    outcome, hub = session
    assert outcome["other format"] == [True, "dense"] and outcome["branches"] == [True, True]
    repository = hub.repositories["me/packed"]
    assert "model.safetensors" in repository.files and not any(name.startswith("packed") for name in repository.files)
    assert "tokenizer.json" in repository.files and not any("chat_template" in name for name in repository.files)
    assert repository.branches["main"].messages == ["Packed", "Dense now"]


def test_a_dense_model_is_not_replaced_unasked(session):
    outcome, hub = session
    branches = hub.repositories["me/dense"].branches
    for message in outcome["refused"]:
        assert message.startswith("FileExistsError: The repository 'me/dense' holds a model that is not a pruned one")
    assert outcome["new branch"] is None and outcome["dense stays"] and len(branches["main"].messages) == 1
    assert outcome["overwritten"] == [None, None] and outcome["replaced"]
    weights = {name for name in branches["other"].files if "safetensors" in name}
    assert weights == {"model.safetensors"} < set(branches["main"].files) | weights


def test_an_adapter_in_the_repository_is_named(session):
    assert session[0]["notes"] == [
        "me/adapted holds an adapter, which transformers will load with the model: remove adapter_config.json if it is merged."
    ]


def test_whether_a_model_can_be_published_is_known_before_it_is_made(session):
    outcome, hub = session
    assert outcome["may push"] == [None, None, None] and not any("fresh" in name for name in hub.repositories)
    invalid, other, reader, read_token, unknown = outcome["may not push"]
    assert invalid.startswith("ValueError: 'not/an/id' is not a valid name of a repository")
    for message in (other, reader):
        assert "PermissionError" in message and "can only create repositories of lab, me)" in message
    assert "(the token is read-only)" in read_token and unknown.startswith("PermissionError")
    assert "(there is no token)" in outcome["check without token"]


def test_without_a_token_or_a_model(session):
    outcome, _ = session
    assert outcome["push without token"].startswith("PermissionError") and "HF_TOKEN" in outcome["push without token"]
    assert (
        outcome["not found"].startswith("OSError") and "could not be downloaded from the Hub" in outcome["not found"]
    )
