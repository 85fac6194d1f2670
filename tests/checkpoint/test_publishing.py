"""Against a stand-in for the Hub on loopback. One process does all that hub_session.py tells; the tests look at it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
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
    report = json.loads(repository.files["neuronal_report.json"][0])
    assert report["calibration"]["seed"] == 3 and report["evaluation"]["wikitext2"]["pruned"] == 23.4567
    assert outcome["by transformers"] and outcome["card"] == 200


def test_the_card(session):
    """Its metadata are what the Hub takes; it says how to load, and how to make the model again."""
    _, hub = session
    text = hub.repositories["me/llama-70"].branches["trial"].files["README.md"][0].decode()
    _, front, body = text.split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["base_model"] == "me/dense-llama" and data["base_model_relation"] == "quantized"
    assert data["library_name"] == "transformers" and data["tags"] == ["sparse", "pruned", "optimum_neuronal"]
    assert 'AutoModelForCausalLM.from_pretrained("me/llama-70")' in body and "import optimum_neuronal" not in body
    assert data["license"] == "llama3" and data["language"] == ["en"], "inherited from the dense model's card"
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == 23.4567
    assert "| wikitext2 | 12.35 | 23.46 |" in re.sub(" +", " ", body)
    assert "8 sequences of 8 tokens of a list of 1 strings, drawn with seed 3" in body
    assert "seed=3" in body and "seq_length=8" in body and "model.layers.2" in body and "transformers 5" in body
    card = hub.repositories["me/packed"]
    assert hub.cards, "validated by the Hub"
    assert card.branches["main"].messages == ["Packed", "Dense now"]


def test_packed(session):
    outcome, hub = session
    assert outcome["packed reloaded"] and outcome["packed inspected"] == "packed" and "hf_other" in hub.tokens


def test_a_model_of_the_hub_is_pruned_as_it_is_loaded(session):
    assert session[0]["pruned at load"]


def test_packed_modules(session):
    """Loaded by its id; pushed by transformers' own `push_to_hub`."""
    outcome, hub = session
    assert outcome["packed modules"] == [21, "me/packed"] and outcome["packed modules pushed"]
    assert not any(name.startswith("model") for name in hub.repositories["me/pushed-packed"].files)


def test_convert_takes_an_id(session):
    """With all that lies beside the weights; what the cache holds is only read, so that there has to be an output."""
    outcome, _ = session
    same, names = outcome["converted"]
    assert same and {"model.safetensors", "tokenizer.json", "README.md", "neuronal_report.json"} <= set(names)
    told = outcome["convert without output"]
    assert told.startswith("ValueError: me/llama-70 is no directory") and told.endswith("name an output.")


def test_a_push_again_leaves_nothing_of_the_old_model(session):
    outcome, hub = session
    assert outcome["changed"] == [True, False] and outcome["other format"] == [True, "dense"]
    files = hub.repositories["me/packed"].files
    assert "model.safetensors" in files and not any(name.startswith("packed") for name in files)


def test_a_branch(session):
    outcome, hub = session
    assert outcome["branches"] == [True, True] and outcome["branch inspected"] == 0.7
    assert set(hub.repositories["me/llama-70"].branches) == {"main", "trial"}


def test_an_upload_that_breaks_off(session):
    """The repository is as it was, and the repeated push goes through."""
    outcome, hub = session
    assert outcome["broke off"].startswith(
        "OSError: The upload to 'me/llama-70' broke off, and the repository is as it was"
    )
    assert outcome["untouched"] and outcome["repeated"]
    assert hub.repositories["me/llama-70"].branches["main"].messages[1:] == ["Less sparse", "Repeated"]


def test_a_card_that_was_edited_on_the_hub_stays(session):
    _, hub = session
    files = hub.repositories["me/edited"].files
    assert files["README.md"][0].endswith(b"# Edited\n") and "model.safetensors" in files


def test_whether_a_model_can_be_published_is_known_before_it_is_made(session):
    outcome, hub = session
    assert outcome["may push"] == [None, None, None] and not any("fresh" in name for name in hub.repositories)
    invalid, other, reader, read_token, unknown = outcome["may not push"]
    assert invalid.startswith("ValueError: 'not/an/id' is no name of a repository on the Hub")
    for told in (other, reader):
        assert "PermissionError: The Hub refused" in told and "may make repositories of lab, me, not of" in told
    assert "(the token may read only): log in with `hf auth login`" in read_token
    assert unknown.startswith("PermissionError: The Hub refused to let you write to 'me/x' (it said: ")
    assert "(there is no token)" in outcome["check without token"]


def test_without_a_token(session):
    outcome, _ = session
    told = outcome["push without token"]
    assert told.startswith("PermissionError: The Hub refused to let you write to 'me/llama-70' (")
    assert "log in with `hf auth login`, or set HF_TOKEN" in told
    assert outcome["load without token"].startswith("OSError")
    told = outcome["inspect without token"]
    assert (
        told.startswith("OSError: me/secret is no directory, and could not be had from the Hub") and "HF_TOKEN" in told
    )
    assert "me/absent is no directory, and could not" in outcome["not found"]
