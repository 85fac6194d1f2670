import json
import os

import pytest

from optimum_neuronal.checkpoint.dense_index import check_dense, check_listed, dense_files


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
