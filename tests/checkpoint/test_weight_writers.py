import json

import pytest
import torch
from safetensors import safe_open

from optimum_neuronal.checkpoint.names import PACKED_INDEX as INDEX
from optimum_neuronal.checkpoint.names import PACKED_SHARD
from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.checkpoint.stored_format import dense_config, packed_config
from optimum_neuronal.checkpoint.weight_writers import PackedWriter, ShardWriter


def test_shards_are_no_larger_than_asked(tmp_path):
    tensors = {f"layers.{index}.weight": torch.eye(32) for index in range(5)}  # 256 bytes each
    with PackedWriter(tmp_path, 600) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    index = json.loads((tmp_path / INDEX).read_text())
    assert len(set(index["weight_map"].values())) == 3 and index["metadata"]["total_size"] == 5 * 256
    with pytest.raises(ValueError, match="a has the dtype torch.complex128"):
        PackedWriter(tmp_path).add("a", torch.ones(2, dtype=torch.complex128))


def test_a_weight_is_packed_only_if_that_saves_space(tmp_path):
    """A part of a larger tensor is stored without the rest; what has no zeros stays as it is."""
    whole = torch.arange(1.0, 65.0).view(8, 8)
    sparse = torch.eye(32)
    with PackedWriter(tmp_path) as writer:
        writer.add("part", whole[:, :2])
        writer.add("sparse", sparse)
    (path,) = (path for path in tmp_path.iterdir() if PACKED_SHARD.fullmatch(path.name))
    file = PackedFile(path)
    assert file.tensors == {"part", "sparse.packed_mask", "sparse.packed_values"}
    assert file.nbytes == 8 * 2 * 4 + 32 * 32 // 8 + 32 * 4
    assert torch.equal(file.get_tensor("part"), whole[:, :2]) and torch.equal(file.get_tensor("sparse"), sparse)


def test_an_error_leaves_no_file_behind(tmp_path):
    with pytest.raises(ValueError, match="bad has the dtype"), PackedWriter(tmp_path, 1) as writer:
        writer.add("good", torch.ones(4))
        writer.add("another", torch.ones(4))
        writer.add("bad", torch.ones(2, dtype=torch.complex128))
    assert not list(tmp_path.iterdir())


def test_a_config_tells_the_format_and_back_again():
    dense = {"model_type": "llama", "sparsity_config": {"sparsity": 0.7, "format": "dense"}}
    packed = packed_config(dense)
    assert packed["sparsity_config"] == {"sparsity": 0.7, "format": "packed"} and packed["model_type"] == "llama"
    assert packed["quantization_config"] == {"quant_method": "optimum_neuronal", "format": "packed", "version": 3}
    assert dense_config(packed) == dense and "quantization_config" not in dense, "what is given is left as it is"
    assert dense_config({"model_type": "llama"}) == {"model_type": "llama"}


class Writer(ShardWriter):
    def write_index(self, index, count):
        (self.folder / "index.json").write_text(json.dumps(index))


def tensors_of(*names):
    return {name: torch.ones(10) for name in names}  # 40 bytes each


def test_what_is_taken_together_lies_in_one_file(tmp_path):
    with Writer(tmp_path, 100, "some") as writer:
        for names in ("a", "bc", "d", "e"):  # b and c do not fit beside a, d does not fit beside them
            writer.take(tensors_of(*names))
    index = json.loads((tmp_path / "index.json").read_text())
    files = {name: f"some-{number:05}-of-00003.safetensors" for name, number in zip("abcde", (1, 2, 2, 3, 3))}
    assert index == {"metadata": {"total_size": 200}, "weight_map": files}
    assert {path.name for path in tmp_path.iterdir()} == {"index.json", *files.values()}
    with safe_open(tmp_path / files["b"], framework="pt") as file:
        assert set(file.keys()) == {"b", "c"} and file.metadata() == {"format": "pt"}


def test_an_error_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), Writer(tmp_path, 50, "some") as writer:
        writer.take(tensors_of("a"))
        writer.take(tensors_of("b"))
        assert list(tmp_path.iterdir()), "a is written"
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())
