import json

import pytest
import torch
from safetensors import safe_open

from optimum_neuronal.checkpoint.names import PACKED_INDEX as INDEX
from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.checkpoint.stored_format import dense_config, packed_config
from optimum_neuronal.checkpoint.weight_writers import DenseWriter, PackedWriter


def test_shards_are_no_larger_than_asked(tmp_path):
    tensors = {f"layers.{index}.weight": torch.eye(32) for index in range(5)}  # 384 bytes each
    with PackedWriter(tmp_path, 800) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    index = json.loads((tmp_path / INDEX).read_text())
    assert len(set(index["weight_map"].values())) == 3 and index["metadata"]["total_size"] == 5 * 384
    with pytest.raises(ValueError, match="a has the dtype torch.complex128"):
        PackedWriter(tmp_path).add("a", torch.ones(2, dtype=torch.complex128))


def test_a_weight_is_packed_only_if_that_saves_space(tmp_path):
    """A part of a larger tensor is stored without the rest; what has no zeros stays as it is."""
    whole = torch.arange(1.0, 65.0).view(8, 8)
    sparse = torch.eye(32)
    with PackedWriter(tmp_path) as writer:
        writer.add("part", whole[:, :2])
        writer.add("sparse", sparse)
    file = PackedFile.open(tmp_path / "packed-00001-of-00001.safetensors")
    assert file.tensors == {"part", "sparse.packed_bits", "sparse.packed_values"}
    assert file.nbytes == 8 * 2 * 4 + 32 * 8 + 32 * 4
    assert torch.equal(file.get_tensor("part"), whole[:, :2]) and torch.equal(file.get_tensor("sparse"), sparse)


def test_a_config_tells_the_format_and_back_again():
    dense = {"model_type": "llama", "sparsity_config": {"sparsity": 0.7, "format": "dense"}}
    packed = packed_config(dense)
    assert packed["sparsity_config"] == {"sparsity": 0.7, "format": "packed"} and packed["model_type"] == "llama"
    assert packed["quantization_config"] == {"quant_method": "optimum_neuronal", "format": "packed", "version": 1}
    assert dense_config(packed) == dense and "quantization_config" not in dense, "what is given is left as it is"
    assert dense_config({"model_type": "llama"}) == {"model_type": "llama"}


def test_files_are_divided_between_weights_and_listed_in_an_index(tmp_path):
    with DenseWriter(tmp_path, 100) as writer:
        for name, rows in zip("abcd", (1, 2, 1, 1)):  # of 40 bytes: b does not fit beside a, c does not fit beside b
            writer.add(name, torch.ones(rows, 10))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {name: f"model-{number:05}-of-00003.safetensors" for name, number in zip("abcd", (1, 2, 3, 3))}
    assert index == {"metadata": {"total_size": 200}, "weight_map": files}
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors.index.json", *files.values()}
    with safe_open(tmp_path / files["c"], framework="pt") as file:
        assert set(file.keys()) == {"c", "d"} and file.metadata() == {"format": "pt"}
