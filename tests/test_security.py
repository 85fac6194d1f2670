"""What holds for checkpoints from somebody else: SECURITY.md. Damage to packed files: checkpoint/test_packed_files.py."""

import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
from sparse_checkpoints import all_files, change_config, save_pruned
from transformers import AutoModelForCausalLM

from optimum_neuronal import (
    convert_checkpoint,
    densify,
    inspect_checkpoint,
    keep_sparsity,
    save_pretrained,
)
from optimum_neuronal.model.load_model import load_model


FORMATS = pytest.mark.parametrize("format", ["packed", "dense"])


def convert_it(folder):
    return convert_checkpoint(folder, "dense" if folder.name == "packed" else "packed", folder.parent / "converted")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    _, model = save_pruned(folder / "dense", overrides={"num_hidden_layers": 2})
    save_pretrained(model, folder / "packed", format="packed")
    return folder


@pytest.fixture
def foreign(saved, tmp_path):
    """`foreign(format)`: a checkpoint to do harm with, in a directory of that name."""
    return lambda format: Path(shutil.copytree(saved / format, tmp_path / format))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was run",)


@FORMATS
def test_nothing_in_a_checkpoint_is_run(foreign, format, monkeypatch, tmp_path):
    """Neither code, nor pickles, nor what its configs name; and what is read is not changed."""
    monkeypatch.chdir(tmp_path)
    folder = foreign(format)
    for name in ("modeling_evil", "configuration_evil", "sitecustomize", "conftest"):
        (folder / f"{name}.py").write_text("raise SystemExit('was run')")
    for name in ("pytorch_model.bin", "model.pt", "optimizer.ckpt"):
        (folder / name).write_bytes(pickle.dumps(Evil()))

    def change(config):
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}
        about = config["sparsity_config"]
        about["config"] |= {"saliency": "os:system", "topup": "antigravity", "dataset": "evil.py"}
        about["config"] |= {"ignore": ["([a-z0-9._]+)+#", "("], "targets": ["("]}
        about["calibration"] = {"source": "/etc/passwd"}

    change_config(folder, change)
    before = all_files(folder)
    for read in (inspect_checkpoint, convert_it, AutoModelForCausalLM.from_pretrained, load_model):
        read(folder)
    with keep_sparsity(densify(AutoModelForCausalLM.from_pretrained(folder))) as keeper:
        assert keeper.sparsity == pytest.approx(0.7, abs=0.01)
    assert not (tmp_path / "was run").exists() and all_files(folder) == before
    assert not any("evil" in name for name in sys.modules) and "antigravity" not in sys.modules
    assert not [path for path in (tmp_path / "converted").iterdir() if path.suffix in (".bin", ".pt", ".ckpt")]


@FORMATS
def test_attention_of_a_repository_is_not_run_unless_the_caller_names_it(foreign, format):
    """transformers would run the repository's code."""
    folder, kernel = foreign(format), "kernels-community/evil"
    change_config(folder, lambda config: config.update(attn_implementation={"": kernel}))
    convert_it(folder)
    assert load_model(folder).config._attn_implementation == "sdpa"
    with pytest.raises((ValueError, ImportError, OSError), match="kernel"):
        load_model(folder, attn_implementation=kernel)


@FORMATS
@pytest.mark.parametrize("name, value", [("intermediate_size", 56), ("vocab_size", 65), ("num_hidden_layers", 10**9)])
def test_weights_that_are_not_the_models_raise(foreign, format, name, value):
    folder = foreign(format)
    change_config(folder, lambda config: config.update({name: value}))
    for read in (load_model, convert_it):
        with pytest.raises((ValueError, RuntimeError), match="shape|mismatch|layers"):
            read(folder)
    assert not (folder.parent / "converted").exists()


@FORMATS
@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", ".hidden.safetensors", "a/b.safetensors"])
def test_an_index_names_no_paths(foreign, format, place):
    folder = foreign(format)
    name = "packed.safetensors.index.json" if format == "packed" else "model.safetensors.index.json"
    (folder / name).write_text(f'{{"metadata": {{}}, "weight_map": {{"a": "{place}"}}}}')
    with pytest.raises(ValueError, match=f"{re.escape(name)} names '{re.escape(place)}': expected"):
        (folder / "model.safetensors").unlink(missing_ok=True)
        inspect_checkpoint(folder)
    with pytest.raises((ValueError, OSError)):
        load_model(folder)


@pytest.mark.parametrize("place", ["../other/", "{}/other/", "link/"])
def test_an_index_of_another_folders_files(place, foreign, tmp_path):
    """Though that folder is a whole checkpoint, with an index of these files."""
    folder = foreign("packed")
    shutil.copytree(folder, folder.parent / "other")
    (folder / "link").symlink_to(folder.parent / "other")
    index = folder / "packed.safetensors.index.json"
    index.write_text(index.read_text().replace("packed-00001", place.format(folder.parent) + "packed-00001"))
    with pytest.raises(ValueError, match="index.json does not name the files of this checkpoint"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="index.json names .*: expected a file in the same folder"):
        load_model(folder)


@pytest.mark.parametrize("linked", ["LICENSE", "1_Pooling/config.json", "tokenizer_config.json"])
def test_links_that_lead_out_of_a_checkpoint_are_not_copied(linked, foreign, tmp_path):
    folder, secret = foreign("dense"), tmp_path / "secret"
    secret.write_text('{"token": "mine"}')
    (folder / linked).parent.mkdir(exist_ok=True)
    (folder / linked).symlink_to(secret)
    (folder / "inside.py").symlink_to("config.json")
    convert_checkpoint(folder, "packed", tmp_path / "converted")
    assert not (tmp_path / "converted" / linked).exists() and (tmp_path / "converted" / "inside.py").is_file()


@FORMATS
def test_an_adapter_is_named_and_not_verified(foreign, format):
    folder = foreign(format)
    assert inspect_checkpoint(folder).verdict == "Verified: the zeros agree with the sparsity_config."
    (folder / "adapter_config.json").write_text("{}")
    assert "NOT checked: the adapter of adapter_config.json" in str(inspect_checkpoint(folder))
