import json
import os

import pytest
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner, compare, evaluate_perplexity
from optimum_neuronal.checkpoint import safe_files
from optimum_neuronal.checkpoint.safe_files import (
    check_config_file,
    check_dense,
    check_file,
    check_listed,
    check_names,
    dense_files,
    load_checkpoint,
    read_bytes,
    read_json,
)


@pytest.fixture
def cache(tmp_path):
    """A model in the Hub's cache: every file, of a folder too, is a link to a blob."""
    (tmp_path / "models--me--llama" / "blobs").mkdir(parents=True)
    commit = tmp_path / "models--me--llama" / "snapshots" / ("0" * 40)
    (commit / "sub").mkdir(parents=True)
    for name, up in (("config.json", "../.."), ("sub/config.json", "../../..")):
        blob = tmp_path / "models--me--llama" / "blobs" / name.replace("/", "-")
        blob.write_text("{}")
        (commit / name).symlink_to(f"{up}/blobs/{blob.name}")
    return commit


def test_links_of_the_hubs_cache_are_followed(cache, tmp_path):
    assert read_json(cache, "config.json") == read_json(cache, "sub/config.json") == {}
    assert read_json(cache / "sub", "config.json") == {}
    (tmp_path / "linked").symlink_to(cache)
    assert read_json(tmp_path / "linked", "config.json") == {}


@pytest.mark.parametrize("place", ["../../refs/main", "../other/config.json", "../../../secret", "/etc/hostname"])
def test_links_to_elsewhere_are_not(cache, place):
    (cache / "config.json").unlink()
    (cache / "config.json").symlink_to(place)
    target = cache / place
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        target.write_text("{}")
    with pytest.raises(ValueError, match="config.json is a link to .*, outside of the directory"):
        check_file(cache, "config.json")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "circle").symlink_to("circle")
    for name, message in (
        ("pipe", "pipe is no file"),
        ("device", "is a link to /dev/zero"),
        (".", "is a link|no file"),
    ):
        with pytest.raises(ValueError, match=message):
            check_file(tmp_path, name)
    for name in ("circle", "absent", "a\nb"):
        with pytest.raises(FileNotFoundError, match="has no file"):
            check_file(tmp_path, name)
    check_config_file(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="config.json is no file"):
        check_config_file(tmp_path)


def test_names_of_files_are_shown_escaped(tmp_path):
    (tmp_path / "x\x1b[2J").symlink_to("/etc/hostname")
    with pytest.raises(ValueError) as error:
        check_file(tmp_path, "x\x1b[2J")
    assert r"x\x1b[2J is a link to" in str(error.value)


def test_names_of_tensors_can_be_shown(tmp_path):
    check_names(tmp_path, ["model.layers.0.mlp.up_proj.weight", "größe", ""])
    with pytest.raises(ValueError) as error:
        check_names(tmp_path, ["a", "b\x1b[2J" + "c" * 10**6])
    assert str(error.value).isprintable() and len(str(error.value)) < 500 + len(str(tmp_path))


def test_json_that_is_too_large_or_too_deep(tmp_path, monkeypatch):
    (tmp_path / "a").write_text(json.dumps({"a": json.loads("[" * 90 + "]" * 90)}))
    assert read_json(tmp_path, "a")
    (tmp_path / "a").write_text(json.dumps({"a": json.loads("[" * 200 + "]" * 200)}))
    with pytest.raises(ValueError, match="a is damaged: lists and objects lie in each other more than 100 deep"):
        read_json(tmp_path, "a")
    monkeypatch.setattr(safe_files, "LARGEST", 10)
    with pytest.raises(ValueError, match="a has 407 bytes, more than any such file needs"):
        read_bytes(tmp_path, "a")


def index(folder, **weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_one_file_goes_before_an_index(tmp_path):
    (tmp_path / "b.safetensors").touch()
    index(tmp_path, x="b.safetensors", y="b.safetensors")
    assert dense_files(tmp_path) == {"b.safetensors": {"x", "y"}}
    (tmp_path / "model.safetensors").touch()
    assert dense_files(tmp_path) == {"model.safetensors": None}


def test_what_transformers_may_open(tmp_path):
    check_dense("")
    check_dense("me/llama")
    check_dense(tmp_path)
    index(tmp_path, x="b.safetensors")
    with pytest.raises(FileNotFoundError, match="has no file b.safetensors"):
        check_dense(tmp_path)
    os.mkfifo(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="b.safetensors is no file"):
        check_dense(tmp_path)
    with pytest.raises(ValueError, match="b.safetensors is no file"):
        check_listed([str(tmp_path / "b.safetensors")])
    (tmp_path / "model.safetensors").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="model.safetensors is a link to /etc/hostname"):
        check_dense(tmp_path)


def test_damaged_headers_are_told_before_transformers_reads_them(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="model.safetensors is damaged, or no safetensors file"):
        check_listed([tmp_path / "model.safetensors"])
    (tmp_path / "pytorch_model.bin").write_bytes(b"of another kind")
    check_listed([tmp_path / "pytorch_model.bin"])


def test_names_that_steer_a_terminal(tmp_path):
    index(tmp_path, **{"x\x1b[2J": "b.safetensors"})
    with pytest.raises(ValueError, match=r"index.json is damaged: it names a tensor"):
        dense_files(tmp_path)


def test_a_model_of_a_directory(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    assert type(load_checkpoint(tmp_path)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "use",
    [
        load_checkpoint,
        lambda path: evaluate_perplexity(str(path), None, "wikitext2"),
        lambda path: compare(str(path), dataset=[[1, 2]], evaluate={"own": [[1, 2]]}),
        lambda path: NeuronALPruner.from_pretrained(path, config=NeuronALConfig(0.5)),
    ],
)
def test_a_pipe_in_the_place_of_weights_is_refused_and_nobody_waits(tmp_path, use):
    """In one of several files: transformers would open it."""
    make_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises((ValueError, OSError), match=shard.name):
        use(tmp_path)
