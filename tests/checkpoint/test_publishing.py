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


def test_packed(session):
    outcome, hub = session
    assert outcome["packed modules"] == 21 and outcome["packed inspected"] == "packed" and "hf_other" in hub.tokens
    same, names = outcome["converted"]
    assert same and {"model.safetensors", "tokenizer.json", "neuronal_report.json"} <= set(names)


def test_a_push_makes_the_branch_equal_to_the_saved_directory(session):
    """In one commit, and only on request if it holds files; a new branch leaves main as it was."""
    outcome, hub = session
    repository = hub.repositories["me/packed"]
    assert outcome["other format"] == [True, "dense"] and outcome["branches"] == [True, True]
    files = {"config.json", "generation_config.json", "model.safetensors", "neuronal_report.json", "README.md"}
    files |= {"tokenizer.json", "tokenizer_config.json", ".gitattributes"}
    assert repository.files.keys() == files == hub.repositories["me/llama-70"].branches["trial"].files.keys()
    assert repository.branches["main"].messages[::2] == ["Packed", "Dense now"]
    assert hub.repositories["me/new-and-empty"].files.keys() == files


def test_nothing_is_replaced_unasked(session):
    outcome, _ = session
    check, push, card = outcome["refused"]
    for message in (check, push):
        assert (
            "FileExistsError: The repository 'me/packed' holds 11 files, a model of type llama pruned with" in message
        )
        assert "choose a new one, or pass --overwrite (overwrite=True) to replace all files in it" in message
    assert "'me/dense-llama' holds 1 files: choose" in card and outcome["allowed"] is None
    assert outcome["branch again"].startswith("FileExistsError: The repository 'me/llama-70' holds")


def test_whether_a_model_can_be_published_is_known_before_it_is_made(session):
    outcome, hub = session
    assert outcome["may push"] == [None, None] and not any("fresh" in name for name in hub.repositories)
    invalid, other, reader, read_token, unknown = outcome["may not push"]
    assert "'not/an/id'" in invalid and "PermissionError: Permission denied for 'me/y' (Invalid" in unknown
    for message in (other, reader):
        assert "PermissionError" in message and "can only create repositories of lab, me)" in message
    assert "PermissionError: Permission denied for 'me/x' (the token is read-only). Log in with" in read_token
    assert "(there is no token)" in outcome["check without token"]


def test_without_a_token_or_a_model(session):
    outcome, _ = session
    assert outcome["push without token"].startswith("PermissionError") and "HF_TOKEN" in outcome["push without token"]
    assert (
        outcome["not found"].startswith("OSError") and "could not be downloaded from the Hub" in outcome["not found"]
    )
