import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sparse_checkpoints import all_files, change_config, save_pruned

from optimum_neuronal import convert_checkpoint, inspect_checkpoint
from optimum_neuronal.checkpoint.opening import Checkpoint, find_checkpoint


def header(value, length=None, data=b"") -> bytes:
    """A safetensors file with any header."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape, offsets, dtype="F32"):
    return {"weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def refused(directory, message):
    """Both say so, change nothing, and allocate nothing that would need gigabytes."""
    before = all_files(directory.parent)
    for read in (
        inspect_checkpoint,
        lambda path: convert_checkpoint(path, "packed"),
        lambda path: convert_checkpoint(path, "dense"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            read(directory)
    assert all_files(directory.parent) == before


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One that is dense in one file, and one in several."""
    folder = tmp_path_factory.mktemp("saved")
    _, model = save_pruned(folder / "dense", overrides={"num_hidden_layers": 1})
    shutil.copytree(folder / "dense", folder / "sharded", ignore=shutil.ignore_patterns("model.safetensors"))
    model.save_pretrained(folder / "sharded", max_shard_size=20_000)
    return folder


@pytest.fixture
def dense(saved, tmp_path):
    return Path(shutil.copytree(saved / "dense", tmp_path / "model"))


@pytest.fixture
def sharded(saved, tmp_path):
    return Path(shutil.copytree(saved / "sharded", tmp_path / "model"))


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "model.safetensors is damaged, or no safetensors file"),
        (b"not tensors at all", "is damaged"),
        (header({}, length=2**62), "is damaged"),
        (header({}, length=90_000_000), "is damaged"),
        (header(b"[" * 100_000), "is damaged"),
        (header(entry([2**40], [0, 2**42])), "is damaged"),
        (header(entry([2**62, 2**62], [0, 8]), data=bytes(8)), "is damaged"),
        (header(entry([2], [0, 4]), data=bytes(4)), "is damaged"),
        (header(entry([-1], [0, 4]), data=bytes(4)), "is damaged"),
        (header(entry([2], [0, 8], "Q9"), data=bytes(8)), "is damaged"),
        (header(entry([2], [0, 8]), data=bytes(7)), "is damaged"),
    ],
)
def test_a_damaged_file(dense, content, message):
    (dense / "model.safetensors").write_bytes(content)
    refused(dense, message)


def test_a_truncated_file(dense):
    content = (dense / "model.safetensors").read_bytes()
    (dense / "model.safetensors").write_bytes(content[: len(content) // 2])
    refused(dense, "model.safetensors is damaged, or no safetensors file")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".hidden.safetensors", "a\\b.safetensors",
             "model.bin", 7, None, ["model.safetensors"], "model.safetensors\0", "x\n.safetensors"],
)  # fmt: skip
def test_a_path_in_the_index(sharded, name):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    path.write_text(json.dumps(index))
    refused(sharded, "expected the name of a .safetensors file in the same directory")


@pytest.mark.parametrize("value", [[], {}, None, "model.safetensors", 3])
def test_an_index_without_a_map(sharded, value):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    refused(sharded, "'weight_map' is no object")


def test_an_index_of_other_files(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["one.more"] = sorted(index["weight_map"].values())[0]
    path.write_text(json.dumps(index))
    refused(sharded, "do not name the same tensors: 'one.more' is in one of them only")
    index["weight_map"]["one.more"] = "model-00099-of-00099.safetensors"
    path.write_text(json.dumps(index))
    refused(sharded, "has no file model-00099-of-00099.safetensors")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "config.json is damaged: it is no JSON text"),
        ("{", "no JSON text"),
        ("[1]", "it holds no object"),
        ("[" * 100_000, "no JSON text"),
        ("{\"a\": \"\xff\"}".encode("latin-1"), "no JSON text"),
        ('{"sparsity_config": ' + "9" * 5000 + "}", "no JSON text"),
        ('{"sparsity_config": NaN}', "sparsity_config is nan: expected an object"),
        ('{"sparsity_config": {"version": 1}}', "config.json: sparsity_config has no 'quant_method'"),
        ('{"quantization_config": {"quant_method": "neuronal"}}', "config.json: .* has format None, version None, but"),
    ],
)  # fmt: skip
def test_a_damaged_config(dense, text, message):
    (dense / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(dense, message)


def test_a_config_of_absurd_size(dense):
    os.truncate(dense / "config.json", 2**33)
    with pytest.raises(ValueError, match="has 8,589,934,592 bytes, more than any such file needs"):
        inspect_checkpoint(dense)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_out_of_the_directory(dense, name):
    (dense / name).rename(dense.parent / "outside")
    (dense / name).symlink_to("../outside")
    refused(dense, f"{name} is a link to .*outside, outside of the directory")
    (dense / name).unlink()
    (dense / name).symlink_to("missing")
    refused(dense, f"has no file {name}")
    (dense / name).unlink()
    (dense / name).mkdir()
    refused(dense, f"{name} is no file")
    (dense / name).rmdir()
    os.mkfifo(dense / name)
    with pytest.raises(ValueError, match=f"{name} is no file"):
        inspect_checkpoint(dense)


def test_links_within_the_directory_are_followed(dense):
    (dense / "model.safetensors").rename(dense / "weights")
    (dense / "model.safetensors").symlink_to("weights")
    assert not inspect_checkpoint(dense).problems


def test_weights_that_are_no_floats(dense):
    """They are counted as they are, and nothing breaks."""
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 0), "a": torch.tensor(1), "b": torch.ones(2, 2) > 0}
    save_file(tensors, dense / "model.safetensors")
    change_config(dense, lambda config: config.update(model_type="unknown"))  # else shapes are compared
    assert [weight.numel for weight in Checkpoint(dense).weights] == [1, 4, 0]
    assert inspect_checkpoint(dense).problems
    packed = convert_checkpoint(dense, "packed", dense.parent / "packed")
    assert inspect_checkpoint(packed).dense_bytes == inspect_checkpoint(dense).dense_bytes == 8 + 4


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="neither a directory nor the id of a model"):
        find_checkpoint("no/such/thing")
    with pytest.raises(OSError, match="me/absent is no directory, and could not be had from the Hub"):
        find_checkpoint("me/absent")
    with pytest.raises(
        FileNotFoundError, match="has no file config.json: expected a model saved with save_pretrained"
    ):
        inspect_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="absent is no directory: check its path; or, .*name an output"):
        convert_checkpoint(tmp_path / "absent", "packed")
