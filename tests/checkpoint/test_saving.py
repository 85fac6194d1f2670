import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model
from profiles import by_day

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, save_pretrained, sparsify
from optimum_neuronal.checkpoint import own_files, saving
from optimum_neuronal.checkpoint.save_pretrained import save_plainly


RELOAD = """
import sys, warnings
warnings.simplefilter("error")
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert not any(name.startswith("optimum_neuronal") for name in sys.modules)
assert model.config.sparsity_config["sparsity"] == 0.7
ids = torch.arange(1, 33).view(2, 16)
torch.save((model(ids).logits, model.state_dict()), sys.argv[2])
"""


def pruned(family="llama", **fields):
    model = make_model(family)
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform", **fields))
    pruner.prune(model)
    return pruner, model


@pytest.mark.parametrize("family", by_day(["llama", "gpt2", "mixtral"], "mixtral"))
def test_plain_transformers_reloads_it(family, tmp_path):
    """A process that never imports the package: equal logits, the same zeros, and not a warning."""
    pruner, model = pruned(family)
    model.save_pretrained(tmp_path / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", RELOAD, tmp_path / "model", tmp_path / "result.pt"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "warn" not in result.stderr.lower() and "not initialized" not in result.stderr
    logits, weights = torch.load(tmp_path / "result.pt")
    with torch.no_grad():
        assert torch.equal(logits, model(torch.arange(1, 33).view(2, 16)).logits)
    for key, value in model.state_dict().items():
        assert torch.equal(weights[key], value)


def test_everything_lies_beside_the_weights(tmp_path, tokenizer):
    pruner, model = pruned()
    pruner.tokenizer = tokenizer
    pruner.save(model, tmp_path / "new" / "model")
    names = {file.name for file in (tmp_path / "new" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "neuronal_report.json", "README.md"} <= names
    report = json.loads((tmp_path / "new" / "model" / "neuronal_report.json").read_text())
    assert set(report.pop("files")) == names
    assert report == json.loads(json.dumps(pruner.report.to_dict()))
    stored = json.loads((tmp_path / "new" / "model" / "config.json").read_text())
    assert stored["sparsity_config"]["achieved_sparsity"] == pruner.report.achieved_sparsity
    assert "quantization_config" not in stored
    card = (tmp_path / "new" / "model" / "README.md").read_text()
    assert "saliency: magnitude, top-up: uniform" in card and "NeuronAL" not in card.partition("## How")[0]
    assert "70.0% of the weights" in card and "model.layers.2" in card and "library_name: transformers" in card
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["model"], "nothing of the staging is left"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_mode_that_the_umask_gives(tmp_path, tokenizer, umask):
    """Dense, packed, in several files, converted and saved again: safetensors alone would write 0600."""
    pruner, model = pruned()
    pruner.tokenizer = tokenizer
    before = os.umask(umask)
    try:
        for _ in range(2):
            pruner.save(model, tmp_path / "dense", format="dense")
        pruner.save(model, tmp_path / "packed", format="packed")
        save_pretrained(model, tmp_path / "shards", max_shard_size=20_000)
        save_pretrained(model, tmp_path / "packed-shards", format="packed", max_shard_size=20_000)
        convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "converted")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) > 7
    assert {path: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(files, oct(0o666 & ~umask))


def test_an_existing_directory_is_updated(tmp_path):
    pruner, model = pruned()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model_of_mine.safetensors").write_text("mine")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("of another model")
    pruner.save(model, tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert {"notes.txt", "model_of_mine.safetensors", "model.safetensors"} <= names
    assert "model-00001-of-00002.safetensors" not in names


def test_a_file_in_the_way_is_found_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, file / "below"):
        with pytest.raises(NotADirectoryError, match="is a file. Choose another directory"):
            own_files.check_directory(path)
    make_model("llama").save_pretrained(tmp_path / "dense")
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=NeuronALConfig(0.7, saliency="wanda"))
    with pytest.raises(NotADirectoryError):
        pruner.quantize(file)
    assert pruner.report is None and file.read_text() == "precious"


@pytest.mark.parametrize("name", ["config.json", "README.md", "model.safetensors", "tokenizer.json"])
def test_a_folder_in_the_way_is_found_before_the_work(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(FileExistsError, match=f"{name} is a folder in the way: rename it"):
        own_files.check_directory(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="no permission to write"):
        own_files.check_directory(tmp_path / "model")


def test_too_little_space_is_said_before_writing(tmp_path, monkeypatch):
    pruner, model = pruned()
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000))
    with pytest.raises(OSError, match="needs 0.1 MB, and 0.0 MB are free: free some space"):
        pruner.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_packed_weights_ask_for_the_room_that_they_take(tmp_path, monkeypatch):
    """A little more than the files, and far less than dense ones; before the prune as after it."""
    asked = []
    monkeypatch.setattr(saving, "check_free", lambda path, needed: asked.append(needed))
    make_model("llama").save_pretrained(tmp_path / "dense")
    fields = {"saliency": "magnitude", "topup": "uniform"}
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=NeuronALConfig(0.7, **fields))
    model = pruner.quantize(tmp_path / "packed", format="packed")
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    packed = sum(path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors"))
    assert len(asked) == 2 and all(0.5 * packed < needed <= packed < 0.8 * dense for needed in asked)
    sparsify(model)
    pruner.save(model, tmp_path / "again")
    save_plainly(model)
    pruner.save(model, tmp_path / "unpacked")
    assert asked[2] < 0.8 * dense and asked[3] == dense


@pytest.mark.parametrize(
    "format, bits, stream",
    [("dense", None, False), ("packed", None, False), ("packed", 8, False), ("dense", None, True)],
)
def test_a_head_that_a_rotation_unties_asks_for_room_before_the_prune(
    tmp_path, ids, monkeypatch, format, bits, stream
):
    """As much as when it is saved: the first number is asked for before the prune."""
    asked = []
    monkeypatch.setattr(saving, "check_free", lambda path, needed: asked.append(needed))
    make_model("gemma").save_pretrained(tmp_path / "dense")
    fields = {"saliency": "wanda", "topup": "uniform", "num_samples": 12, "num_alignment_samples": 2}
    rotation = {"rotate": True, "rotate_args": {"steps": 1, "fisher_samples": 1}}
    config = NeuronALConfig(0.7, embedding_bits=bits, **fields, **rotation)
    place = {"stream_to": tmp_path / "work", "device": torch.device("cpu")} if stream else {}
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config, **place)
    pruner.quantize(tmp_path / "model", dataset=ids, format=format)
    assert asked[0] == pytest.approx(asked[1], rel=0.002), "a mask's last byte of every matrix"


@pytest.mark.parametrize("existing", [False, True])
def test_a_disk_that_fills_up_leaves_the_old_files(tmp_path, monkeypatch, existing):
    pruner, model = pruned()
    directory = tmp_path / "model"
    if existing:
        directory.mkdir()
        (directory / "model.safetensors").write_text("old")

    def full(self, folder, files):
        (Path(folder) / "half").write_text("written")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(pruner.report), "save", full)
    with pytest.raises(OSError, match="failed, and its files are as they were: .*No space left"):
        pruner.save(model, directory)
    if existing:
        assert [file.name for file in directory.iterdir()] == ["model.safetensors"]
        assert (directory / "model.safetensors").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == (["model"] if existing else [])


def test_a_tokenizer_for_which_there_is_no_room(tmp_path, tokenizer, monkeypatch):
    """The tokenizers library says so by a plain `Exception`."""

    def full(folder):
        raise Exception("No space left on device (os error 28)")

    pruner, model = pruned()
    pruner.tokenizer = tokenizer
    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="failed, and its files are as they were: No space left on device"):
        pruner.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_readme_of_the_users_stays(tmp_path, caplog):
    """One of ours is replaced, until the user takes it over by removing a line."""
    pruner, model = pruned()
    card = tmp_path / "README.md"
    card.write_text("# My project")
    pruner.save(model, tmp_path)
    assert card.read_text() == "# My project" and (tmp_path / "model.safetensors").exists()
    assert "is your own, so it stays, and no model card is written" in caplog.text
    card.unlink()
    pruner.save(model, tmp_path)
    first = card.read_text()
    assert "of the weights" in first and own_files.MARK in first
    card.write_text(first + "changed")
    pruner.save(model, tmp_path)
    assert card.read_text() == first
    card.write_text(first.replace(own_files.MARK, "mine"))
    pruner.save(model, tmp_path)
    assert card.read_text() == first.replace(own_files.MARK, "mine")
    card.write_bytes(b"\xff not UTF-8")
    pruner.save(model, tmp_path)
    assert card.read_bytes() == b"\xff not UTF-8"


def test_the_directory_that_a_model_was_read_from_is_refused(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "dense")
    before = (tmp_path / "dense" / "model.safetensors").read_bytes()
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config)
    with pytest.raises(FileExistsError, match="is the directory that the model was read from"):
        pruner.quantize(tmp_path / "dense" / ".." / "dense")
    assert pruner.report is None
    model = pruner.prune(pruner.model)
    with pytest.raises(FileExistsError, match="is the directory that the model was read from"):
        pruner.save(model, tmp_path / "dense")
    assert (tmp_path / "dense" / "model.safetensors").read_bytes() == before
