import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_files import FILE, QUANTIZED, header_of, read, tensors, with_header, write
from packed_files import SPARSE as NAME
from profiles import examples

from optimum_neuronal.checkpoint.names import PACKED_INDEX as INDEX
from optimum_neuronal.checkpoint.packed_reading import PackedFile, check_fit, open_checkpoint
from optimum_neuronal.checkpoint.weight_writers import PackedWriter


FUZZ = examples(60)


def equal(found):
    expected = tensors()
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and found[name].shape == value.shape and torch.equal(found[name], value)
        for name, value in expected.items()
    )


def check_damaged(folder):
    """Damage is an error that names the file, or it does not touch a weight."""
    try:
        assert equal(read(folder)), "silently another weight"
    except ValueError as error:
        assert str(folder) in str(error)


def test_what_was_written_is_read(tmp_path):
    for number, size in enumerate(("1GB", 1)):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number), size)
        assert equal(read(tmp_path / str(number)))
    assert len(list((tmp_path / "1").glob("packed-*-of-00007.safetensors"))) == 7
    file = PackedFile.open(tmp_path / "0" / FILE)
    assert set(file.keys()) == tensors().keys()
    assert file.get_slice(NAME).get_shape() == [70, 9] and file.get_slice(NAME).get_dtype() == "BF16"
    assert torch.equal(file.get_slice(NAME)[1:3], tensors()[NAME][1:3])


@FUZZ
@given(data=st.data())
def test_a_flipped_bit_is_noticed(folder, data):
    """In a file every one of them: in the header, a mask, a value, a plain tensor."""
    folder, file, index = folder
    target, content = data.draw(st.sampled_from([(FILE, file), (FILE, file), (INDEX, index)]))
    position = data.draw(st.integers(0, len(content) * 8 - 1))
    damaged = bytearray(content)
    damaged[position // 8] ^= 1 << position % 8
    (folder / FILE).write_bytes(file)
    (folder / INDEX).write_bytes(index)
    (folder / target).write_bytes(damaged)
    if target == FILE:
        with pytest.raises(ValueError, match=FILE):
            read(folder)
    else:
        check_damaged(folder)


@examples(40)
@given(data=st.data())
def test_a_file_cut_short_or_overwritten(folder, data):
    folder, file, index = folder
    target, content = data.draw(st.sampled_from([(FILE, file), (INDEX, index)]))
    start = data.draw(st.integers(0, len(content)))
    stuff = data.draw(st.binary(max_size=20))
    (folder / FILE).write_bytes(file)
    (folder / INDEX).write_bytes(index)
    (folder / target).write_bytes(
        content[:start] + stuff + data.draw(st.sampled_from([b"", content[start + len(stuff) :]]))
    )
    check_damaged(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@examples(60)
@given(data=st.data())
def test_nonsense_in_a_header(folder, data):
    """Any JSON in any place of the header, of the metadata in it, or of the index."""
    folder, file, index = folder
    header, about, weights = header_of(file)
    listed = json.loads(index)
    node = data.draw(st.sampled_from([header, about, listed]))
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(JSON)
    has_place = isinstance(header.get("__metadata__"), dict) and "neuronal" in header["__metadata__"]
    (folder / FILE).write_bytes(with_header(header, about if has_place else None, weights))
    (folder / INDEX).write_text(json.dumps(listed))
    check_damaged(folder)


@pytest.mark.parametrize("name, part", [(NAME, "bits"), (QUANTIZED, "codes")])
@pytest.mark.parametrize("size", [2**40, 10**30, 2**63 - 1])
def test_absurd_sizes_allocate_nothing(folder, size, name, part):
    folder, file, index = folder
    (folder / INDEX).write_bytes(index)
    header, about, weights = header_of(file)
    for shape in ([size, size], [size, 9], [70, size]):
        about["tensors"][name]["shape"] = shape
        (folder / FILE).write_bytes(with_header(header, about, weights))
        with pytest.raises(
            ValueError, match=f"{FILE}: {name} is damaged: its {part} have dtype torch.uint8 and shape"
        ):
            read(folder)
    header[f"{name}.packed_{part}"]["shape"] = [size]
    (folder / FILE).write_bytes(with_header(header, about, weights))
    with pytest.raises(ValueError, match="is damaged, or no safetensors file"):
        read(folder)
    (folder / FILE).write_bytes(size.to_bytes(16, "little")[:8] + weights)
    with pytest.raises(ValueError, match="is damaged, or no safetensors file"):
        read(folder)


def change(folder, edit):
    """Edits header, metadata and data of the file, and keeps the sizes consistent."""
    folder, file, index = folder
    header, about, weights = header_of(file)
    weights = edit(header, about, bytearray(weights)) or weights
    (folder / FILE).write_bytes(with_header(header, about, weights))
    (folder / INDEX).write_bytes(index)
    return folder


def test_damage_is_told_precisely(folder):
    def bitmask_bit(header, about, weights):
        weights[header[f"{NAME}.packed_bits"]["data_offsets"][0]] ^= 1
        return weights

    def value_bit(header, about, weights):
        weights[header[f"{NAME}.packed_values"]["data_offsets"][0]] ^= 1
        return weights

    def lost_bits(header, about, weights):
        header["other"] = header.pop(f"{NAME}.packed_bits")

    def unknown_tensor(header, about, weights):
        del about["tensors"]["norm.weight"]

    def no_checksum(header, about, weights):
        del about["tensors"][NAME]["crc32"]

    def newer(header, about, weights):
        about["version"] = 2

    def foreign(header, about, weights):
        about.clear()

    for edit, message in [
        (bitmask_bit, f"{NAME} is damaged: its checksum is"),
        (value_bit, f"{NAME} is damaged: its checksum is"),
        (lost_bits, f"has no tensor '{NAME}.packed_bits'"),
        (unknown_tensor, "holds the tensor 'norm.weight', which its metadata does not know"),
        (no_checksum, f"metadata of '{NAME}' is .* expected a 'crc32'"),
        (newer, "version 2 of the packed format, but this optimum_neuronal reads 1: install another one"),
        (foreign, "is no file of a packed checkpoint"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            read(change(folder, edit))
        assert FILE in str(caught.value)


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
    listed["weight_map"][f"{NAME}.packed_bits"] = name
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
    with pytest.raises(ValueError, match="names .* bytes of tensors, but its files hold .*: tensors are missing"):
        read(tmp_path)


def test_a_missing_file(tmp_path):
    write(tmp_path, 1)
    Path(tmp_path, "packed-00002-of-00007.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="packed-00002-of-00007"):
        read(tmp_path)


def test_shapes_are_compared_with_the_model(folder):
    folder, file, index = folder
    (folder / FILE).write_bytes(file)
    (folder / INDEX).write_bytes(index)
    weights = [weight for file in open_checkpoint(folder) for weight in file.weights.values()]
    model = {name: tensor.to("meta") for name, tensor in tensors().items()}
    check_fit(weights, model)
    with pytest.raises(ValueError, match=rf"{FILE}: {NAME} has the shape \(70, 9\), but the model's \(9, 70\)"):
        check_fit(weights, model | {NAME: torch.empty(9, 70, device="meta")})
    with pytest.raises(ValueError, match="larger than any weight of the model"):
        check_fit(weights, {"small": torch.empty(2, device="meta")})
