"""Packed weights of both formats in files: as docs/format.md describes them, and damaged."""

import zlib
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_files import (
    BYTES,
    FILE,
    QUANTIZED,
    QUANTIZED_TRANSPOSED,
    SPARSE,
    SPARSE_TRANSPOSED,
    change,
    header_of,
    is_transposed,
    packed,
    read,
    tensors,
    write,
)
from profiles import examples

from optimum_neuronal.checkpoint.packed_reading import PackedFile


NAMES = list(packed())
EVERY_NAME = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def path(tmp_path):
    write(tmp_path)
    return tmp_path / FILE


@EVERY_NAME
def test_what_was_written_is_read(path, name):
    stored, weight, dense = PackedFile.open(path).get_slice(name), packed()[name], tensors()[name]
    found = stored.read_packed()
    assert type(found) is type(weight) and (found.shape, found.dtype) == (weight.shape, weight.dtype)
    assert all(torch.equal(tensor, weight.tensors()[key]) for key, tensor in found.tensors().items())
    assert stored[...].is_contiguous() and torch.equal(stored[...], dense) and torch.equal(stored[1:3], dense[1:3])
    assert stored.get_shape() == list(dense.shape) and stored.transposed == is_transposed(name)
    assert stored.is_packed and (stored.code_bits is not None) == (name not in (SPARSE, SPARSE_TRANSPOSED))
    assert stored.stored_bytes == sum(part.nbytes for part in weight.parts(name).values())


DOCUMENTED = {
    SPARSE: ({"format": "sparse", "shape": [70, 9], "dtype": "BF16"}, [("bits", "U8", [70, 8]), ("values", "BF16", None)]),
    SPARSE_TRANSPOSED: (
        {"format": "sparse", "shape": [9, 70], "dtype": "F32", "transposed": True},
        [("bits", "U8", [70, 8]), ("values", "F32", None)],
    ),
    QUANTIZED: (
        {"format": "quantized", "shape": [70, 9], "dtype": "BF16"},
        [("codes", "U8", [2, 3, 3, 32]), ("scales", "BF16", [70]), ("steps", "BF16", [9])],
    ),
    QUANTIZED_TRANSPOSED: (
        {"format": "quantized", "shape": [6, 66], "dtype": "F16", "transposed": True},
        [("codes", "U8", [2, 2, 2, 32]), ("scales", "BF16", [66])],
    ),
    BYTES: (
        {"format": "quantized", "shape": [5, 12], "dtype": "F32"},
        [("codes", "I8", [5, 12]), ("scales", "BF16", [5])],
    ),
}  # fmt: skip


@EVERY_NAME
def test_the_file_is_as_it_is_documented(path, name):
    """Metadata, dtypes, shapes and the bytes of the checksum, as docs/format.md has them."""
    facts, entries = DOCUMENTED[name]
    header, about, content = header_of(path.read_bytes())
    found = about["tensors"][name]
    crc = found.pop("crc32")
    assert about["version"] == 1 and found == facts
    data = b""
    for key, dtype, shape in entries:
        entry = header[f"{name}.packed_{key}"]
        assert entry["dtype"] == dtype and entry["shape"] == (shape or [packed()[name].kept])
        data += content[slice(*entry["data_offsets"])]
    transposed = " transposed" if is_transposed(name) else ""
    text = f"{name} {facts['dtype']} {facts['format']}{transposed} {'x'.join(map(str, facts['shape']))}"
    assert f"{zlib.crc32(text.encode() + data):08x}" == crc


def part_of(content: bytes, name: str, part: str) -> tuple[dict, bytes]:
    header, _, data = header_of(content)
    entry = header[f"{name}.packed_{part}"]
    return entry, data[slice(*entry["data_offsets"])]


def numbers(content: bytes, name: str, part: str, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.frombuffer(bytearray(part_of(content, name, part)[1]), dtype=dtype)


def test_sparse_weights_by_hand(path):
    """An element is where its bit is set; docs/format.md says which bit."""
    content = path.read_bytes()
    bits, values = numbers(content, SPARSE, "bits", torch.uint8).view(70, 8), numbers(content, SPARSE, "values")
    found, taken = torch.zeros(70, 9, dtype=torch.bfloat16), iter(values)
    for row, column in product(range(70), range(9)):
        if bits[row, column // 8] >> column % 8 & 1:
            found[row, column] = next(taken)
    assert torch.equal(found, tensors()[SPARSE]) and next(taken, None) is None


def test_quantised_weights_by_hand(path):
    """Codes are read bit by bit; docs/format.md says which bits."""
    content, levels = path.read_bytes(), torch.empty(70, 9)
    planes = numbers(content, QUANTIZED, "codes", torch.uint8).view(2, 3, 3, 32)
    for row, column in product(range(70), range(9)):
        bytes_ = planes[row // 64, column // 4, :, row % 32]
        place = column % 4 + 4 * (row % 64 // 32)
        code = sum((int(byte) >> place & 1) << bit for bit, byte in enumerate(bytes_))
        levels[row, column] = 2 * code - 7
    scales, steps = (numbers(content, QUANTIZED, part).float() for part in ("scales", "steps"))
    assert torch.equal((levels * (scales[:, None] * steps)).bfloat16(), tensors()[QUANTIZED])
    codes, scales = numbers(content, BYTES, "codes", torch.int8).view(5, 12), numbers(content, BYTES, "scales")
    assert torch.equal(codes.float() * scales.float()[:, None], tensors()[BYTES])


@pytest.mark.parametrize(
    "name, part", [(name, key) for name, (_, entries) in DOCUMENTED.items() for key, *_ in entries]
)
def test_a_flipped_bit_is_found_by_the_checksum(path, name, part):
    content, file = bytearray(path.read_bytes()), PackedFile.open(path)
    stored = next(stored for stored in file.get_slice(name).parts if stored.name == f"{name}.packed_{part}")
    content[stored.offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{FILE}: {name} is damaged: its checksum is"):
        file.get_tensor(name)


def put(part: str, values, at: int = 0):
    """Return an edit that overwrites some bytes of a part."""
    return lambda facts, parts, headers: parts[part].__setitem__(slice(at, at + len(values)), values)


def number(part: str, value: float, at: int = 0):
    """Return an edit that overwrites a bfloat16 number of a part."""
    return put(part, bytes(torch.tensor([value]).bfloat16().view(torch.uint8).tolist()), 2 * at)


def fact(**values):
    """Return an edit of a weight's metadata; None: the entry is taken out."""

    def edit(facts, parts, headers):
        facts.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del facts[key]

    return edit


def header(part: str, **values):
    """Return an edit of the header of a part, whose size stays the same."""
    return lambda facts, parts, headers: headers[part].update(values)


def lost(part: str):
    return lambda facts, parts, headers: parts.pop(part)


def extra(part: str, dtype: str = "BF16", shape=(9,)):
    """Return an edit that adds a tensor of zeros."""

    def edit(facts, parts, headers):
        parts[part], headers[part] = bytearray(2 * shape[0]), {"dtype": dtype, "shape": list(shape)}

    return edit


def more_values(facts, parts, headers):
    parts["values"] += bytes(2 * 700)
    headers["values"]["shape"][0] += 700


def no_row(facts, parts, headers):
    """Describe a weight of 2**40 rows without columns, which takes no bytes."""
    facts["shape"] = [2**40, 0]
    for key, shape in (("bits", [2**40, 0]), ("values", [0])):
        parts[key], headers[key]["shape"] = bytearray(), shape


WHOLE = "expected a list of 2 to 8 whole numbers above 0"
OF_ANY = [
    (fact(format="coded"), "its format is 'coded': expected one of quantized, sparse"),
    (fact(format=["sparse"]), "its format is a list of 1: expected one of"),
    (fact(format=7), "its format is 7: expected one of"),
    (fact(dtype="F8"), "its dtype is None: expected a floating one"),
    (fact(dtype=[1]), "its dtype is None: expected a floating one"),
    (fact(dtype=None), "its dtype is None: expected a floating one"),
    (fact(dtype="I8"), "its dtype is torch.int8: expected a floating one"),
    (fact(dtype="F64"), "its .* torch.float64"),
    (fact(shape=None), f"its shape is None: {WHOLE}"),
    (fact(shape=[910]), rf"its shape is \[910\]: {WHOLE}"),
    (fact(shape=[70, 9.0]), f"its shape is .*: {WHOLE}"),
    (fact(shape=[70, True]), f"its shape is .*: {WHOLE}"),
    (fact(shape=[-70, -9]), f"its shape is .*: {WHOLE}"),
    (fact(shape=[70, 0]), f"its shape is .*: {WHOLE}"),
    (fact(shape="70x9"), f"its shape is '70x9': {WHOLE}"),
    (fact(shape={"rows": 70}), f"its shape is .*: {WHOLE}"),
    (fact(shape=[135, 9]), r"its (bits|codes) have dtype .* and shape .*: expected .* of shape \[135, 9\]"),
    (fact(transposed="yes"), "its 'transposed' is 'yes': expected true or false"),
    (fact(transposed=1), "its 'transposed' is 1: expected true or false"),
    (fact(transposed=True), r"its (bits|codes) have dtype .* expected .* for .* weight of shape \[9, 70\]"),
]
OF_SPARSE = [
    (put("bits", [0, 0]), "its bitmask keeps .* values, but .* are stored"),
    (put("bits", [0x02], at=1), "its bitmask has bits set behind a row's 9 elements"),
    (put("bits", [0x80], at=7), "its bitmask has bits set behind a row's 9 elements"),
    (
        header("bits", shape=[560]),
        r"its bits have dtype torch.uint8 and shape \[560\]: expected torch.uint8 and \[70, 8\]",
    ),
    (header("bits", dtype="I8"), "its bits have dtype torch.int8 .* expected torch.uint8"),
    (header("values", dtype="F16"), "its values have dtype torch.float16 .* expected torch.bfloat16"),
    (
        lambda facts, parts, headers: headers["values"]["shape"].append(1),
        r"its values have .* shape \[\d+, 1\]: expected",
    ),
    (more_values, r"it has \d+ values: expected at most 630 for shape \[70, 9\]"),
    (lost("bits"), f"the file has no tensor '{SPARSE}.packed_bits'"),
    (lost("values"), f"the file has no tensor '{SPARSE}.packed_values'"),
    (no_row, WHOLE),
]
OF_QUANTIZED = [
    (put("codes", [0x10], at=5 * 96 + 31), "its codes have bits set behind the 70 rows and 9 columns"),
    (put("codes", [0x40], at=3 * 96 + 6), "its codes have bits set behind the 70 rows and 9 columns"),
    (put("codes", [0x02], at=2 * 96), "its codes have bits set behind the 70 rows and 9 columns"),
    (header("codes", shape=[3, 2, 3, 32]), r"its codes have .* shape \[3, 2, 3, 32\]: expected torch.uint8 and \[2, 3, 3, 32\]"),
    (header("codes", shape=[2, 3, 96]), r"its codes have .* shape \[2, 3, 96\]: expected torch.int8 and \[70, 9\] for 8 bits"),
    (header("codes", shape=[2, 1, 9, 32]), "its codes have 9 bits: expected a whole number from 2 to 8"),
    (header("codes", shape=[2, 9, 1, 32]), "its codes have 1 bits: expected a whole number from 2 to 8"),
    (header("codes", dtype="I8"), "its codes have dtype torch.int8 .* expected torch.int8 and .* for 8 bits"),
    (header("scales", shape=[70, 1]), r"its scales have .* shape \[70, 1\]: expected torch.bfloat16 and \[70\]"),
    (header("scales", dtype="F16"), "its scales have dtype torch.float16 .* expected torch.bfloat16"),
    (header("steps", shape=[1, 9]), r"its steps have .* shape \[1, 9\]: expected torch.bfloat16 and \[9\]"),
    (number("scales", -1.0), "its scales reach from -1.0 to .*: expected finite, at least 0"),
    (number("scales", float("nan")), "its scales reach from nan to nan: expected finite"),
    (number("scales", float("inf"), at=69), "its scales reach from .* to inf: expected finite"),
    (number("scales", 3e38), "its scales and steps allow elements of .*: expected at most 3.39e.38, the largest of torch.bfloat16"),
    (number("steps", 0.0), "its steps reach from 0.0 to .*: expected finite, above 0"),
    (number("steps", -2.0, at=8), "its steps reach from -2.0 to .*: expected finite, above 0"),
    (number("steps", float("nan")), "its steps reach from nan to nan: expected finite"),
    (number("steps", float("inf")), "its steps reach from .* to inf: expected finite"),
    (lost("codes"), f"the file has no tensor '{QUANTIZED}.packed_codes'"),
    (lost("scales"), f"the file has no tensor '{QUANTIZED}.packed_scales'"),
]  # fmt: skip
OF_BYTES = [
    (put("codes", [128], at=59), "its codes have -128 among them: expected -127 to 127"),
    (header("codes", dtype="U8"), "its codes have dtype torch.uint8 .* expected torch.int8"),
    (number("scales", 3e37), r"its scales and steps allow elements of 3.*e\+39: expected at most 3.4e.38"),
    (extra("steps", shape=(5,)), r"its steps have .* shape \[5\]: expected torch.bfloat16 and \[12\]"),
    (extra("bits"), f"holds the tensor '{BYTES}.packed_bits', which its metadata does not know"),
]
DAMAGE = [(name, *case) for name, cases in (
    (SPARSE, [*OF_ANY, *OF_SPARSE]), (QUANTIZED, [*OF_ANY, *OF_QUANTIZED]), (BYTES, OF_BYTES),
    (SPARSE, [(extra("steps"), "holds the tensor '.*steps', which its metadata does not know")]),
) for case in cases]  # fmt: skip


@pytest.mark.parametrize("name, edit, message", DAMAGE)
def test_damage_is_an_error_that_says_what_was_expected(path, name, edit, message):
    """Checksums are right, so that the check itself has to find it."""
    change(path, name, edit)
    with pytest.raises(ValueError, match=message) as caught:
        PackedFile.open(path).get_tensor(name)
    assert FILE in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(
    "facts", [None, 7, [], "sparse", {}, {"crc32": 7}, {"crc32": "0a1b2c3"}, {"crc32": "0A1B2C3D"}]
)
@pytest.mark.parametrize("name", [SPARSE, QUANTIZED])
def test_metadata_that_are_none(path, name, facts):
    def edit(known, parts, headers):
        known.clear()
        known.update(facts if isinstance(facts, dict) else {"crc32": facts})

    change(path, name, edit)
    with pytest.raises(ValueError, match=f"metadata of '{name}' .* expected a 'crc32' of 8 hex digits"):
        PackedFile.open(path)


@EVERY_NAME
@examples(20)
@given(data=st.data())
def test_whatever_the_parts_hold_is_a_weight_or_an_error(path, name, data):
    """With a checksum that is right, some bytes are any: what is unpacked has the shape, and is finite if it is quantised."""
    write(path.parent)

    def edit(facts, parts, headers):
        for _ in range(data.draw(st.integers(1, 3))):
            part = parts[data.draw(st.sampled_from(sorted(parts)))]
            part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))

    change(path, name, edit)
    try:
        found = read(path.parent)[name]
    except ValueError as error:
        assert FILE in str(error) and name in str(error)
    else:
        expected = tensors()[name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.isfinite().all() or name in (SPARSE, SPARSE_TRANSPOSED)


SHAPES = st.lists(st.integers(0, 600) | st.integers(2**31, 2**70), max_size=5)


@pytest.mark.parametrize("name", [SPARSE, QUANTIZED, BYTES])
@examples(40)
@given(data=st.data())
def test_whatever_headers_say_is_a_weight_or_an_error(path, name, data):
    """Shapes, dtypes and metadata are any, checksums right."""
    write(path.parent)

    def edit(facts, parts, headers):
        for key in data.draw(st.lists(st.sampled_from([*headers, "facts"]), min_size=1, max_size=2)):
            if key == "facts":
                kinds = {"shape": SHAPES, "dtype": st.sampled_from(["F64", "F32", "F16", "BF16", "F8_E5M2", "C64", "I8"]),
                         "transposed": st.booleans(), "format": st.sampled_from(["sparse", "quantized"])}  # fmt: skip
                fact = data.draw(st.sampled_from(sorted(kinds)))
                facts[fact] = data.draw(kinds[fact])
            else:
                headers[key]["shape"] = data.draw(st.permutations(headers[key]["shape"]) | SHAPES)
                headers[key]["dtype"] = data.draw(st.sampled_from([headers[key]["dtype"], "I8", "U8", "F16", "BF16"]))

    change(path, name, edit)
    try:
        PackedFile.open(path).get_tensor(name)
    except ValueError as error:
        assert FILE in str(error)
