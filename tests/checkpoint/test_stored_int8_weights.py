import zlib

import packed_files
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_files import FILE, bfloat16, draw_bytes, fact, header_of, put
from profiles import examples

from optimum_neuronal.checkpoint.coding import HeadCoding
from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.checkpoint.stored_weights import StoredInt8Weight, int8_seed
from optimum_neuronal.checkpoint.weight_writers import PackedWriter
from optimum_neuronal.formats.int8_weight import Int8Weight


NAME = "lm_head.weight"
INT8_PARTS = StoredInt8Weight.ends


def rounded() -> torch.Tensor:
    weight = torch.randn(7, 130, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[2, :128] = 0
    return Int8Weight.nearest(weight).unpack()


def write(folder) -> PackedFile:
    with PackedWriter(folder, codings=[HeadCoding({"head_weights": [NAME]}, [NAME, "norm.weight"])]) as writer:
        writer.add(NAME, rounded())
        writer.add("norm.weight", torch.ones(3))
    return PackedFile.open(folder / FILE)


def test_the_file_is_as_it_is_documented(tmp_path):
    """docs/format.md, and what it holds is what was written."""
    file = write(tmp_path)
    header, about, content = header_of(file.path.read_bytes())
    facts = about["tensors"][NAME]
    assert about["version"] == 3 and header.keys() == {
        "__metadata__",
        "norm.weight",
        *(NAME + end for end in INT8_PARTS),
    }
    crc = facts.pop("crc32")
    assert facts == {"shape": [7, 130], "mask": False, "bits": 8, "group": 128, "dtype": "BF16"}
    entries = [header[NAME + end] for end in (".packed_codes", ".packed_scales")]
    assert [(e["dtype"], e["shape"]) for e in entries] == [("I8", [7, 130]), ("BF16", [7, 2])]
    parts = [content[slice(*entry["data_offsets"])] for entry in entries]
    assert f"{zlib.crc32(f'{NAME} BF16 8 bits without mask 7x130'.encode() + b''.join(parts)):08x}" == crc
    codes = torch.frombuffer(bytearray(parts[0]), dtype=torch.int8).view(7, 130)
    scales = torch.frombuffer(bytearray(parts[1]), dtype=torch.bfloat16).view(7, 2)
    by_hand = (codes.float() * scales.float().repeat_interleave(128, 1)[:, :130]).bfloat16()
    stored = file.get_slice(NAME)
    assert torch.equal(stored[...], by_hand) and torch.equal(by_hand, rounded())
    assert stored.get_shape() == [7, 130] and stored.get_dtype() == "BF16" and torch.equal(stored[1:3], by_hand[1:3])
    assert stored.stored_bytes == 7 * 130 + 7 * 2 * 2 and stored.kept == 7 * 130 and not scales[2, 0]


def changed(file, edit):
    seed = int8_seed(NAME, "BF16", [7, 130])
    return packed_files.changed(file.path, NAME, INT8_PARTS, edit, lambda facts: seed)


@pytest.mark.parametrize(
    "edit, message",
    [
        (put(".packed_scales", bfloat16(torch.nan)), "its scale of row 0 and group 0 is nan: expected one of"),
        (put(".packed_scales", bfloat16(torch.inf)), "its scale of row 0 and group 0 is inf"),
        (put(".packed_scales", bfloat16(-1.0)), "is -1.0"),
        (put(".packed_scales", bfloat16(0.0)), "is 0.0"),
        (put(".packed_codes", bytes([128])), "-128 among them"),
        (fact(bits=4), "its 'bits' is 4: expected 8 of a matrix without a mask"),
        (fact(bits=True), "its 'bits' is True"),
        (fact(mask=True), "its 'mask' is True: expected False"),
        (fact(mask=0), "its 'mask' is 0: expected False"),
        (fact(group=64), "its 'group' is 64"),
        (fact(dtype="F64"), "its dtype is torch.float64"),
        (fact(dtype=[1]), "its dtype is None"),
        (fact(shape=[130, 7]), "its codes have dtype torch.int8 and shape"),
        (fact(shape=[910]), "expected that of a matrix"),
        (fact(shape=[-7, -130]), "expected that of a matrix"),
        (fact(shape=None), "expected that of a matrix"),
    ],
)
def test_what_is_damaged_is_told(tmp_path, edit, message):
    """With a checksum that is right, so that it is the check itself that finds it."""
    path = changed(write(tmp_path), edit)
    with pytest.raises(ValueError, match=message) as caught:
        PackedFile.open(path).get_tensor(NAME)
    assert FILE in str(caught.value) and NAME in str(caught.value)


@pytest.mark.parametrize("part", INT8_PARTS)
def test_a_flipped_bit_is_told_by_the_checksum(tmp_path, part):
    file = write(tmp_path)
    content = bytearray(file.path.read_bytes())
    content[next(stored for stored in file.get_slice(NAME).parts if stored.name == NAME + part).offset] ^= 1
    file.path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{NAME} is damaged: its checksum is"):
        file.get_tensor(NAME)


@examples(25)
@given(data=st.data())
def test_whatever_the_parts_hold_is_finite_or_an_error(tmp_path_factory, data):
    file = write(tmp_path_factory.mktemp("fuzz"))
    path = changed(file, lambda facts, parts, header: draw_bytes(data, parts))
    try:
        found = PackedFile.open(path).get_tensor(NAME)
    except ValueError as error:
        assert FILE in str(error) and NAME in str(error)
    else:
        assert found.isfinite().all() and found.shape == (7, 130)
