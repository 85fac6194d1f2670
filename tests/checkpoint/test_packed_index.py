import json
from pathlib import Path

import pytest
import torch
from packed_files import FILE, NAME, read, tensors, write

from optimum_neuronal.checkpoint.names import PACKED_INDEX as INDEX
from optimum_neuronal.checkpoint.packed_index import check_shapes, open_checkpoint
from optimum_neuronal.checkpoint.packed_writing import PackedWriter


@pytest.mark.parametrize(
    "name",
    [
        "../packed-00001-of-00001.safetensors",
        "/etc/passwd",
        "model.safetensors",
        "packed-00002-of-00002.safetensors",
        7,
    ],
)
def test_an_index_that_names_other_files(folder, name):
    folder, file, index = folder
    (folder / FILE).write_bytes(file)
    listed = json.loads(index)
    listed["weight_map"][f"{NAME}.packed_mask"] = name
    (folder / INDEX).write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=INDEX):
        read(folder)


def test_index_and_file_that_disagree(folder):
    folder, file, index = folder
    (folder / FILE).write_bytes(file)
    listed = json.loads(index)
    del listed["weight_map"]["norm.weight"]
    (folder / INDEX).write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="do not name the same tensors: 'norm.weight' is in one of them only"):
        read(folder)


def test_a_weight_that_is_nowhere(tmp_path):
    """Left out of index and file alike: transformers would initialise it at random."""
    write(tmp_path)
    size = json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    with PackedWriter(tmp_path) as writer:
        for name, tensor in list(tensors().items())[:-1]:
            writer.add(name, tensor)
    listed = json.loads((tmp_path / INDEX).read_text())
    listed["metadata"]["total_size"] = size
    (tmp_path / INDEX).write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="tells of .* bytes of tensors, but its files hold .*: tensors are missing"):
        read(tmp_path)


def test_a_missing_file(tmp_path):
    write(tmp_path, 1)
    Path(tmp_path, "packed-00002-of-00004.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="packed-00002-of-00004"):
        read(tmp_path)


def test_shapes_are_compared_with_the_model(folder):
    folder, file, index = folder
    (folder / FILE).write_bytes(file)
    (folder / INDEX).write_bytes(index)
    files, model = open_checkpoint(folder), {name: tensor.to("meta") for name, tensor in tensors().items()}
    check_shapes(files, model)
    with pytest.raises(ValueError, match=rf"{FILE}: {NAME} has the shape \(6, 5\), but the model's \(5, 6\)"):
        check_shapes(files, model | {NAME: torch.empty(5, 6, device="meta")})
    with pytest.raises(ValueError, match="larger than any weight of the model"):
        check_shapes(files, {"small": torch.empty(2, device="meta")})
