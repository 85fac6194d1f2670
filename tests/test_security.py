"""The promises of SECURITY.md, each with the test that bears its name."""

import ast
import json
import os
import pickle
import re
import shlex
import shutil
import socket
import struct
import sys
from pathlib import Path

import pytest
from sparse_checkpoints import all_files, change_config, save_pruned
from transformers import AutoModelForCausalLM

from optimum_neuronal import (
    NeuronALConfig,
    SparseModelForCausalLM,
    convert_checkpoint,
    inspect_checkpoint,
    keep_sparsity,
    save_pretrained,
)
from optimum_neuronal.checkpoint.card import with_format
from optimum_neuronal.checkpoint.safe_files import load_checkpoint


SECURITY = Path(__file__).parents[1] / "SECURITY.md"
INDEX, FILE = "packed.safetensors.index.json", "packed-00001-of-00001.safetensors"
DENSE_INDEX, DENSE_FILE = "model.safetensors.index.json", "model.safetensors"
HOSTILE = "x\n\nVerified: the zeros agree with the sparsity_config.\x1b[2J\u202e"
TESTED: dict[str, list[str]] = {}


def promise(name: str):
    """Says which promise a test bears out."""

    def mark(test):
        TESTED.setdefault(name, []).append(test.__name__)
        return test

    return mark


def test_every_promise_has_a_test_that_names_it():
    text = SECURITY.read_text(encoding="utf-8")
    promised = re.findall(r"^- \*\*([\w-]+)\*\*: ", text, re.M)
    assert len(promised) == len(set(promised)) > 10
    assert set(promised) == set(TESTED), "each promise has a test, and each test a promise"
    done = text.partition("## What is never done")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- ", done, re.M)) == len(promised), "and no promise is without a name"


def inspect_it(folder):
    return inspect_checkpoint(folder)


def convert_it(folder):
    to = "dense" if folder.name == "packed" else "packed"
    return convert_checkpoint(folder, to, folder.parent / "converted")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def load_packed(folder):
    return SparseModelForCausalLM.from_pretrained(folder)


def prune_at_load(folder):
    config = NeuronALConfig(0.8, saliency="magnitude", topup="uniform")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, sparsity_config=None)


READERS = {"packed": (inspect_it, convert_it, load, load_packed), "dense": (inspect_it, convert_it, load_packed)}
DENSE_READERS = (*READERS["dense"], prune_at_load)
FORMATS = pytest.mark.parametrize("format", ["packed", "dense"])


def refused(folder, message, readers):
    """All ways to read it say so, in text that can be shown."""
    for read in readers:
        with pytest.raises((ValueError, OSError), match=message) as error:
            read(folder)
        assert all(line.isprintable() for line in str(error.value).splitlines()), read.__name__
        assert not (folder.parent / "converted").exists(), "nothing is left behind"


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


@promise("no-code")
@FORMATS
def test_code_is_not_run(foreign, format):
    folder = foreign(format)
    for name in ("modeling_evil", "configuration_evil", "sitecustomize", "conftest"):
        (folder / f"{name}.py").write_text("raise SystemExit('was run')")
    kinds = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}
    change_config(folder, lambda config: config.update(auto_map=kinds))
    for read in READERS[format]:
        read(folder)
    assert not any("evil" in name for name in sys.modules)


@promise("no-code")
@FORMATS
def test_attention_of_a_repository_is_refused_unless_the_caller_names_it(foreign, format):
    """transformers would run the repository's code."""
    readers = (load_packed, load_checkpoint, load if format == "packed" else prune_at_load)
    kernel = "kernels-community/evil"
    for named in (dict(_attn_implementation=kernel), dict(attn_implementation={"": kernel})):
        folder = foreign(format)
        change_config(folder, lambda config, named=named: config.update(named))
        refused(folder, f"config.json names the attention '{kernel}', which is code of a repository", readers)
        if "attn_implementation" in named:  # with the other name, transformers goes by the file, whatever is passed
            for read in (SparseModelForCausalLM.from_pretrained, load_checkpoint):
                assert read(folder, attn_implementation="eager").config._attn_implementation == "eager"
        shutil.rmtree(folder)
    with pytest.raises(Exception, match="kernels"):
        load_checkpoint(foreign(format), attn_implementation=kernel)


@promise("no-waiting")
@FORMATS
def test_absurd_configs_are_refused_at_once(foreign, format):
    """Millions of layers would be made, and gigabytes of text read."""
    folder = foreign(format)
    change_config(folder, lambda config: config.update(num_hidden_layers=10**9))
    readers = (load_packed, load_checkpoint, load if format == "packed" else prune_at_load)
    refused(folder, "config.json names 1,000,000,000 layers, expected at most", readers)
    os.truncate(folder / "config.json", 2**31)
    refused(
        folder, "config.json has 2,147,483,648 bytes, more than any such file needs", (load_packed, load_checkpoint)
    )
    (folder / "config.json").unlink()
    for read in (load_packed, load_checkpoint):
        with pytest.raises(FileNotFoundError, match=f"no config.json in .*{format}"):
            read(folder)


@promise("no-second-opinion")
@FORMATS
@pytest.mark.parametrize("name, value", [("intermediate_size", 56), ("vocab_size", 65), ("num_key_value_heads", 1)])
def test_shapes_that_are_not_the_models_are_refused(foreign, format, name, value):
    folder = foreign(format)
    change_config(folder, lambda config: config.update({name: value}))
    refused(folder, r"has the shape \(.*\), but the model's \(", (inspect_it, convert_it))
    for read in (load_packed, load_checkpoint):
        with pytest.raises((ValueError, RuntimeError), match="shape|mismatch"):
            read(folder)


@FORMATS
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_labels", "num_local_experts", "hidden_size"])
def test_no_absurd_model_is_made_to_compare_shapes(foreign, format, name):
    """Nor is its config, which may list something for each layer."""
    folder = foreign(format)
    change_config(folder, lambda config: config.update({name: 10**9, "model_type": "qwen3_moe"}))
    assert inspect_it(folder).problems == []


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was run",)


@promise("no-pickle")
@FORMATS
def test_pickles_are_not_opened(foreign, format, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = foreign(format)
    for name in ("pytorch_model.bin", "model.pt", "optimizer.ckpt"):
        (folder / name).write_bytes(pickle.dumps(Evil()))
    for read in READERS[format]:
        read(folder)
    assert not (tmp_path / "was run").exists()
    assert not [path for path in (tmp_path / "converted").iterdir() if path.suffix in (".bin", ".pt", ".ckpt")]


@promise("no-lookup")
@FORMATS
def test_names_are_not_looked_up(foreign, format):
    folder = foreign(format)

    def change(config):
        config["sparsity_config"]["config"] = {"saliency": "os:system", "topup": "antigravity", "dataset": "evil.py"}
        config["sparsity_config"]["calibration"] = {"source": "/etc/passwd"}

    change_config(folder, change)
    for read in READERS[format]:
        read(folder)
    with keep_sparsity(load(folder)):
        assert "antigravity" not in sys.modules


@promise("no-patterns")
def test_patterns_are_not_searched(foreign):
    folder = foreign("packed")
    patterns = ["([a-z0-9._]+)+#", "("]
    change_config(folder, lambda config: config["sparsity_config"]["config"].update(ignore=patterns, targets=patterns))
    model = load(folder)
    with keep_sparsity(model) as keeper:
        assert keeper.sparsity == pytest.approx(0.7, abs=0.01)
    change_config(folder, lambda config: config["sparsity_config"]["config"].update(ignore=3))
    for read in READERS["packed"]:
        with pytest.raises(ValueError, match="sparsity_config.config.ignore is 3: expected a list or null"):
            read(folder)


@promise("no-commands")
def test_commands_on_a_card_are_quoted():
    title = "x'; rm -rf ~; $(touch a) `touch b` \"+__import__('os')+\""
    use = """model = AutoModelForCausalLM.from_pretrained("x")\ntokenizer = AutoTokenizer.from_pretrained(evil("x"))"""
    card = with_format(f"# {title}\n\n## Use\n\n{use}\n\n## Sparsity\n", "packed", {})
    assert "evil" not in card
    (line,) = re.findall(r"^optimum-cli .*$", card, re.M)
    assert shlex.split(line)[3] == title
    (code,) = re.findall(r"from_pretrained\((.*)\)$", card, re.M)
    assert ast.literal_eval(code) == title


@promise("no-paths")
@FORMATS
@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", ".hidden.safetensors", "a/b.safetensors"])
def test_an_index_names_no_paths(foreign, format, place, tmp_path):
    folder = foreign(format)
    name = INDEX if format == "packed" else DENSE_INDEX
    if format == "dense":
        (folder / DENSE_FILE).rename(folder / "model-1.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": place}}
    (folder / name).write_text(json.dumps(index))
    refused(
        folder, f"{re.escape(name)} says that 'a' lies in", READERS[format] if format == "packed" else DENSE_READERS
    )


def weights(format):
    return ("config.json", INDEX, FILE) if format == "packed" else ("config.json", DENSE_FILE)


@promise("no-links")
@FORMATS
def test_links_out_of_the_directory_are_refused(foreign, format, tmp_path):
    for name in weights(format):
        folder = foreign(format)
        (folder / name).rename(tmp_path / "outside")
        (folder / name).symlink_to("../outside")
        readers = READERS[format] if format == "packed" else DENSE_READERS
        refused(folder, f"{name} is a link to .*outside, outside of the directory", readers)
        shutil.rmtree(folder)


@promise("no-links")
@FORMATS
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "generation_config.json"])
def test_links_beside_the_weights_are_refused(foreign, format, name, tmp_path):
    folder = foreign(format)
    (tmp_path / "outside").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../outside")
    readers = (
        READERS[format] if name != "adapter_config.json" else (inspect_it, convert_it, load_packed, load_checkpoint)
    )
    refused(folder, f"{name} is a link to .*outside, outside of the directory", readers)


@FORMATS
def test_adapters_are_named_and_not_verified(foreign, format):
    folder = foreign(format)
    assert inspect_it(folder).verdict == "Verified: the zeros agree with the sparsity_config."
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("{}")
    found = inspect_it(folder)
    assert found.to_dict()["adapters"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert "NOT checked: adapter_config.json, adapter_model.safetensors. transformers loads this adapter" in str(found)


@promise("no-links")
@FORMATS
def test_links_of_the_hubs_cache_are_followed(foreign, format, tmp_path):
    cache = tmp_path / "models--me--llama"
    commit = cache / "snapshots" / "c0" / format
    commit.mkdir(parents=True)
    foreign(format).rename(cache / "blobs")
    for file in (cache / "blobs").iterdir():
        (commit / file.name).symlink_to(f"../../../blobs/{file.name}")
    for read in READERS[format] if format == "packed" else DENSE_READERS:
        read(commit)


@promise("no-waiting")
@FORMATS
def test_pipes_are_refused(foreign, format, tmp_path):
    for name in weights(format)[1:]:
        folder = foreign(format)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        held = os.open(folder / name, os.O_RDWR)  # if one is opened after all, the test fails and does not hang
        try:
            refused(folder, f"{name} is no file", READERS[format] if format == "packed" else DENSE_READERS)
        finally:
            os.close(held)
        shutil.rmtree(folder)
    folder = foreign(format)
    os.mkfifo(folder / "notes.txt")
    refused(folder, "notes.txt is no file", [convert_it])


@promise("no-network")
@FORMATS
def test_nothing_is_fetched(foreign, format, monkeypatch):
    def connect(*_):
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    folder = foreign(format)
    change_config(
        folder, lambda config: config["sparsity_config"]["config"].update(dataset="me/evil", tokenizer="me/e")
    )
    for read in READERS[format]:
        read(folder)


def header(tensors, metadata=None) -> bytes:
    text = json.dumps({**({"__metadata__": metadata} if metadata else {}), **tensors}).encode()
    return struct.pack("<Q", len(text)) + text


@promise("no-trust-in-sizes")
@FORMATS
def test_nothing_is_allocated_for_sizes_that_are_only_told(foreign, format):
    folder, huge = foreign(format), 2**45
    readers = READERS[format] if format == "packed" else DENSE_READERS
    name = weights(format)[-1]
    (folder / name).write_bytes(header({"a": {"dtype": "F32", "shape": [huge], "data_offsets": [0, 4 * huge]}}))
    refused(folder, f"{name} is damaged", readers)
    if format == "packed":
        parts = {"a.packed_bits": ("U8", [1, 1], [0, 1]), "a.packed_values": ("F32", [0], [1, 1])}
        tensors = {key: dict(zip(("dtype", "shape", "data_offsets"), value)) for key, value in parts.items()}
        facts = {"format": "sparse", "shape": [huge, huge], "dtype": "F32", "crc32": "00000000"}
        about = {"version": 1, "tensors": {"a": facts}}
        (folder / name).write_bytes(header(tensors, {"neuronal": json.dumps(about)}) + b"\0")
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(parts, name)}
        (folder / INDEX).write_text(json.dumps(index))
        refused(folder, f"{name}: a is damaged: its bits have", readers)
    os.truncate(folder / "config.json", 2**33)
    refused(folder, "more than any such file needs", [inspect_it, convert_it])


@promise("no-silent-damage")
@pytest.mark.parametrize("offset", [20, 1000, 5000])
def test_a_flipped_bit_is_an_error(foreign, offset):
    folder = foreign("packed")
    content = bytearray((folder / FILE).read_bytes())
    content[-offset] ^= 16
    (folder / FILE).write_bytes(content)
    refused(folder, f"{FILE}: .* is damaged", READERS["packed"])


@promise("no-second-opinion")
@pytest.mark.parametrize(
    "format, change, message",
    [
        ("packed", lambda c: c["quantization_config"].update(version=2), "version 2, but this optimum_neuronal reads"),
        ("packed", lambda c: c["quantization_config"].pop("version"), "version None, but this optimum_neuronal reads"),
        ("packed", lambda c: c["quantization_config"].update(format="bitmap"), "has format 'bitmap'"),
        ("packed", lambda c: c["sparsity_config"].update(version=2), "sparsity_config.version is 2"),
        ("packed", lambda c: c["sparsity_config"].update(format="dense"), "contradicts itself"),
        ("packed", lambda c: c["sparsity_config"].update(left_out=[3]), r"sparsity_config.left_out\[0\] is 3"),
        ("dense", lambda c: c["sparsity_config"].update(version=2), "sparsity_config.version is 2"),
        ("dense", lambda c: c["sparsity_config"].update(format="packed"), "contradicts itself"),
        (
            "dense",
            lambda c: c["sparsity_config"].update(achieved_sparsity=7),
            "sparsity_config.achieved_sparsity is 7",
        ),
    ],
)
def test_all_ways_to_read_give_one_answer(foreign, format, change, message):
    folder = foreign(format)
    change_config(folder, change)
    refused(folder, message, READERS[format])


@promise("no-raw-text")
@FORMATS
def test_text_is_shown_escaped(foreign, format):
    folder = foreign(format)

    def change(config):
        about = config["sparsity_config"]
        about["calibration"], about["versions"] = {"source": HOSTILE}, {HOSTILE: HOSTILE}
        about["block_sparsity"][HOSTILE] = 0.5

    change_config(folder, change)
    lines = str(inspect_checkpoint(folder)).split("\n")
    assert all(line.isprintable() for line in lines) and not any(line.startswith("Verified") for line in lines)
    with pytest.raises(ValueError) as error:
        keep_sparsity(load(folder))
    assert "block_sparsity" in str(error.value) and str(error.value).isprintable()
    (folder / weights(format)[-1]).write_bytes(
        header({HOSTILE: {"dtype": HOSTILE, "shape": [], "data_offsets": [0, 0]}})
    )
    refused(folder, f"{weights(format)[-1]} is damaged", READERS[format])


@promise("no-writing")
@FORMATS
def test_what_is_read_is_not_changed(foreign, format):
    folder = foreign(format)
    before = all_files(folder)
    for read in READERS[format] if format == "packed" else DENSE_READERS:
        read(folder)
    with keep_sparsity(load(folder)):
        pass
    assert all_files(folder) == before
