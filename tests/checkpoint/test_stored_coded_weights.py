import zlib

import packed_files
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_files import (
    BITS,
    FILE,
    NAME,
    TRANSPOSED,
    bfloat16,
    draw_bytes,
    fact,
    header_of,
    put,
    read,
    tensors,
    write,
)  # fmt: skip
from profiles import examples

from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.checkpoint.stored_weights import StoredCodedWeight, coded_seed
from optimum_neuronal.formats.packed import PackedWeight


CODED_PARTS = StoredCodedWeight.ends


@pytest.fixture
def file(tmp_path):
    write(tmp_path, coded=True)
    return PackedFile.open(tmp_path / FILE)


@pytest.fixture
def wide(tmp_path):
    """Whose scales are bfloat16."""
    write(tmp_path, coded=True, size=1000)
    return PackedFile.open(tmp_path / FILE)


def test_scales_that_are_not_short_are_stored_as_they_are(wide):
    expected = tensors(1000)
    assert [stored.dtype for stored in wide.get_slice(NAME).parts] == ["U8", "U8", "BF16", "I8"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read(wide.path.parent).items())


def test_what_was_written_is_read(file):
    expected = tensors()
    for name, tensor in read(file.path.parent).items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
        assert tensor.is_contiguous()
    assert file.tensors == {name + end for name in (NAME, TRANSPOSED) for end in CODED_PARTS} | {
        "norm.weight",
        "steps",
    }
    stored = file.get_slice(NAME)
    assert stored.get_shape() == [6, 5] and stored.get_dtype() == "BF16" and stored.bits == BITS
    assert torch.equal(stored[1:3], expected[NAME][1:3])
    packed = PackedWeight.pack(expected[NAME])
    assert torch.equal(stored.read_packed().unpack(), packed.unpack())
    assert torch.equal(stored.read_packed().mask.bits, packed.mask.bits)
    assert len(packed.values) <= stored.kept <= 30
    across = file.get_slice(TRANSPOSED)
    assert across.transposed and torch.equal(across.read_packed().unpack().T, expected[TRANSPOSED])
    assert across.get_shape() == [5, 6] and across.read_packed().shape == (6, 5)


def test_the_file_is_as_it_is_documented(file):
    """docs/format.md: metadata of version 3, and the bytes of a scale and of a checksum."""
    header, about, content = header_of(file.path.read_bytes())
    facts = about["tensors"][NAME]
    assert about["version"] == 3 and about["tensors"][TRANSPOSED]["transposed"] is True
    assert facts.keys() == {"shape", "bits", "group", "dtype", "crc32"}
    assert (facts["shape"], facts["bits"], facts["group"], facts["dtype"]) == ([6, 5], 3, 128, "BF16")
    dtypes = [header[NAME + end]["dtype"] for end in CODED_PARTS]
    assert dtypes == ["U8", "U8", "U8", "I8"] and header[NAME + ".packed_scales"]["shape"] == [6, 1]
    data = b"".join(
        content[slice(*header[NAME + end]["data_offsets"])]
        for end in (".packed_mask", ".packed_codes", ".packed_scales", ".packed_table")
    )
    assert f"{zlib.crc32(f'{NAME} BF16 3 bits 6x5'.encode() + data):08x}" == facts["crc32"]


def changed(file, edit):
    """The folder of a file whose weight was edited."""

    def seed(facts):
        return coded_seed(NAME, facts["dtype"], facts["shape"], facts["bits"], facts.get("transposed", False))

    return packed_files.changed(file.path, NAME, CODED_PARTS, edit, seed).parent


def cut_codes(facts, parts, header):
    parts[".packed_codes"].pop()


def more_codes(facts, parts, header):
    parts[".packed_codes"] += bytes(200)


def padding(facts, parts, header):
    parts[".packed_codes"][2] |= 0x80  # of the second row, which keeps two


def behind_the_mask(facts, parts, header):
    parts[".packed_mask"][-1] |= 0x80


def no_group(facts, parts, header):
    del facts["group"]


def no_shape(facts, parts, header):
    del facts["shape"]


@pytest.mark.parametrize(
    "edit, message",
    [
        (put(".packed_scales", [0]), "its scale of row 0 and group 0 is 0.0: expected one of"),
        (put(".packed_table", [130]), "its table is .* expected levels of -127 to 127, ascending, symmetric"),
        (put(".packed_table", [0]), "its table is .* ascending"),
        (put(".packed_table", [200, 166, 202]), "its table is"),
        (put(".packed_mask", [0b00110000]), "its codes take .* expected"),
        (cut_codes, "its codes take .* expected"),
        (more_codes, "its codes have dtype torch.uint8 .* expected torch.uint8 and one dimension of at most"),
        (padding, "its codes have bits set between"),
        (behind_the_mask, "its bitmask has bits set behind"),
        (fact(bits=4), r"its table have dtype torch.int8 and shape \[8\]: expected torch.int8 and \[16\]"),
        (fact(bits=5), "values of 5 bits are not known"),
        (fact(bits="3"), "values of '3' bits are not known"),
        (fact(bits=True), "values of True bits are not known"),
        (fact(group=64), "its scales are for groups of 64 columns: expected 128"),
        (no_group, "its scales are for groups of None columns"),
        (fact(dtype="F64"), "its dtype is torch.float64: expected one of"),
        (fact(dtype="F8"), "its dtype is None"),
        (fact(dtype=[1]), "its dtype is None"),
        (fact(shape=[5, 7]), "its bitmask has"),
        (no_shape, "its shape is None"),
        (fact(transposed=True), r"its scales have .* expected torch.bfloat16 or torch.uint8 and \[5, 1\]"),
        (fact(transposed="yes"), "its 'transposed' is 'yes'"),
    ],
)
def test_what_is_damaged_is_told(file, edit, message):
    """With a checksum that is right, so that it is the check itself that finds it."""
    with pytest.raises(ValueError, match=message) as caught:
        read(changed(file, edit))
    assert FILE in str(caught.value) and NAME in str(caught.value)


@pytest.mark.parametrize(("scale", "told"), [("nan", "nan"), ("inf", "inf"), (-1, "-1.0"), (0, "0.0"), (1e-39, "1.0")])
def test_a_scale_that_none_can_be_is_told(wide, scale, told):
    edit = put(".packed_scales", bfloat16(float(scale)))
    with pytest.raises(ValueError, match=f"its scale of row 0 and group 0 is {told}.*: expected one of") as caught:
        read(changed(wide, edit))
    assert FILE in str(caught.value) and NAME in str(caught.value)


def test_a_table_of_ones_own_is_read(file):
    table = [-127, -90, -50, -20, 20, 50, 90, 127]
    found = read(changed(file, put(".packed_table", [level % 256 for level in table])))[NAME]
    assert torch.equal(found != 0, tensors()[NAME] != 0) and not torch.equal(found, tensors()[NAME])


def test_a_scale_where_nothing_is_kept(file):
    """The row's mask is emptied, its codes taken out; its scale has to go too."""
    rows = tensors()[NAME] != 0
    row = next(index for index in range(6) if rows[index].any())
    before = sum(-(-int(kept.sum()) * BITS // 8) for kept in rows[:row])

    def edit(facts, parts, header):
        for column in range(5):
            bit = row * 5 + column
            parts[".packed_mask"][bit // 8] &= ~(1 << bit % 8) & 0xFF
        del parts[".packed_codes"][before : before + -(-int(rows[row].sum()) * BITS // 8)]

    with pytest.raises(
        ValueError, match=f"its scale of row {row} and group 0 is .* expected 0, since nothing is kept"
    ):
        read(changed(file, edit))


@pytest.mark.parametrize("part", CODED_PARTS)
def test_a_flipped_bit_is_told_by_the_checksum(file, part):
    content = bytearray(file.path.read_bytes())
    stored = next(stored for stored in file.get_slice(NAME).parts if stored.name == NAME + part)
    content[stored.offset] ^= 1
    file.path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{NAME} is damaged: its checksum is"):
        read(file.path.parent)


@examples(25)
@given(data=st.data())
def test_whatever_the_parts_hold_is_a_weight_with_these_zeros_or_an_error(file, data):
    """With a checksum that is right: nothing but what the format admits is unpacked."""
    write(file.path.parent, coded=True, size=data.draw(st.sampled_from([1, 1000])))
    folder = changed(file, lambda facts, parts, header: draw_bytes(data, parts))
    try:
        found = read(folder)[NAME]
    except ValueError as error:
        assert FILE in str(error) and NAME in str(error)
    else:
        mask = PackedFile.open(folder / FILE).get_slice(NAME).read_packed().mask.unpack()
        assert found.isfinite().all() and torch.equal(found != 0, mask)
