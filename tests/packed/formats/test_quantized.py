from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import nearest
from profiles import examples

from optimum_neuronal.native.library import DTYPES
from optimum_neuronal.packed.formats import packed_matrix, quantized
from optimum_neuronal.packed.formats.bit_planes import BLOCK_ROWS, decode_rows, encode_planes, planes_shape
from optimum_neuronal.packed.formats.quantized import QuantizedWeight, quantized_bytes


BITS = range(2, 9)
SHAPES = [(1, 1), (3, 128), (5, 70), (2, 40, 66), (130, 1)]  # blocks have 64 rows, groups 4 columns
LEVELS = {2: [-3, -1, 1, 3], 3: [-7, -5, -3, -1, 1, 3, 5, 7]}


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def with_kernels(request, monkeypatch):
    """Both ways to compute."""
    if not request.param:
        monkeypatch.setattr(quantized, "find_kernel", lambda: None)


def test_levels_by_hand(with_kernels):
    """Levels of few bits are odd; those of 8 bits are all whole numbers but -128."""
    for bits, levels in LEVELS.items():
        codes = torch.arange(2**bits, dtype=torch.uint8)[None]
        weight = QuantizedWeight.encode(codes, bits, torch.tensor([0.5]).bfloat16(), dtype=torch.float32)
        assert weight.unpack().tolist() == [[0.5 * level for level in levels]]
    codes = torch.tensor([[-127, 0, 5]], dtype=torch.int8)
    weight = QuantizedWeight.encode(codes, 8, torch.tensor([2.0]).bfloat16(), dtype=torch.float32)
    assert weight.unpack().tolist() == [[-254, 0, 10]]


def test_steps_by_hand(with_kernels):
    codes, scales = torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8), torch.tensor([2.0]).bfloat16()
    weight = QuantizedWeight.encode(codes, 2, scales, torch.tensor([1, 2, 4, 0.5]).bfloat16(), torch.float32)
    weight.check()
    assert weight.unpack().tolist() == [[-6, -4, 8, 3]] and weight.nbytes == quantized_bytes((1, 4), 2, steps=True)


def test_planes_by_hand():
    """Rows 0 and 32 share a byte; bit 0 of a half belongs to the first of four columns."""
    codes = torch.zeros(33, 5, dtype=torch.uint8)
    codes[0] = torch.tensor([3, 1, 0, 2, 1])
    codes[32, 1] = 2
    planes = encode_planes(codes, 2)
    assert planes.shape == planes_shape(33, 5, 2) == (1, 2, 2, 32)
    assert planes[0, 0, 0, 0] == 0b0000_0011 and planes[0, 0, 1, 0] == 0b0010_1001 and planes[0, 1, 0, 0] == 1
    assert torch.equal(decode_rows(planes, torch.arange(33), 5), codes)


@examples(25)
@given(rows=st.integers(1, 150), columns=st.integers(1, 40), bits=st.integers(2, 7), seed=st.integers(0, 99))
def test_codes_come_back(rows, columns, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    planes, some = encode_planes(codes, bits), torch.randint(0, rows, (7,), generator=generator)
    assert torch.equal(decode_rows(planes, torch.arange(rows), columns), codes)
    assert torch.equal(decode_rows(planes, some, columns), codes[some])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_rounding_to_the_nearest_level(bits, dtype):
    """Also of numbers so small that scales are the least there is, and so large that they reach the dtype's largest."""
    largest, limit = 127 if bits == 8 else 2**bits - 1, torch.finfo(dtype)
    for shape in SHAPES:
        for size in (1.0, 1e-3, float(limit.max)):
            weight = torch.rand(shape, generator=torch.Generator().manual_seed(bits)) * 2 - 1
            weight = (weight * size).to(dtype)
            weight[0] = 0
            found = QuantizedWeight.nearest(weight, bits)
            found.check()
            rounded = found.unpack()
            assert rounded.shape == shape and rounded.dtype == dtype and found.nbytes == quantized_bytes(shape, bits)
            assert bool(rounded.isfinite().all()) and not rounded[0].any() and not rounded[0].signbit().any()
            step = weight.double().abs().amax(-1, keepdim=True) / largest * (1 if bits == 8 else 2)
            # half a step, a scale that is off by 2**-8, and the rounding of elements
            off = (rounded.double() - weight.double()).abs() - 0.5 * step - step * largest * 2**-8
            assert (off <= limit.eps * weight.double().abs()).all()


@pytest.mark.parametrize("count", [0, 1, 8, 9, quantized.MAX_FUSED_ROWS, quantized.MAX_FUSED_ROWS + 1])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_products(bits, count, with_kernels, monkeypatch):
    """Of few and of many rows of x; of many W is unpacked by blocks."""
    monkeypatch.setattr(packed_matrix.multiply_by_blocks, "__defaults__", (BLOCK_ROWS,))
    weight = nearest((150, 70), bits, steps=True)
    generator = torch.Generator().manual_seed(count)
    x, bias = torch.randn(count, 70, generator=generator), torch.randn(150, generator=generator)
    dense = weight.unpack()
    for beside in (None, bias):
        y = weight.linear(x, beside)
        assert y.shape == (count, 150)
        off = (y - torch.nn.functional.linear(x, dense, beside)).norm() / (x.norm() * dense.norm() + 1e-9)
        assert off < (2e-3 if count <= quantized.MAX_FUSED_ROWS else 1e-6)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_rows(bits, with_kernels):
    """Views where they begin and end with a block; else the codes are laid out anew."""
    weight = nearest((200, 70), bits, steps=True)
    dense, x = weight.unpack(), torch.randn(3, 70)
    for first, last in [(0, 200), (64, 128), (128, 200), (0, 64), (1, 199), (64, 130), (10, 11)]:
        part = weight.rows(first, last)
        part.check()
        shared = part.codes.untyped_storage().data_ptr() == weight.codes.untyped_storage().data_ptr()
        assert shared == (bits == 8 or (first % 64 == 0 and last in (64, 128, 200)))
        assert part.shape == (last - first, 70) and torch.equal(part.unpack(), dense[first:last])
        assert torch.allclose(part.linear(x), weight.linear(x)[:, first:last], atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_looking_up_rows(bits):
    weight = nearest((150, 70), bits, torch.bfloat16, steps=True)
    ids = torch.tensor([[0, 33, 149], [149, 64, 1]])
    found = weight.look_up(ids)
    assert found.dtype == torch.bfloat16 and torch.equal(found, weight.unpack()[ids])


def test_a_stack_of_matrices():
    """All dimensions but the last count rows."""
    weight = torch.randn(3, 30, 20, generator=torch.Generator().manual_seed(0))
    found = QuantizedWeight.nearest(weight, 4)
    assert found.shape == (3, 30, 20) and found.scales.shape == (90,) and found.codes.shape == planes_shape(90, 20, 4)
    flat = QuantizedWeight.nearest(weight.view(90, 20), 4)
    assert torch.equal(found.unpack(), flat.unpack().view(3, 30, 20)) and found.error(weight) == flat.error(
        weight.view(90, 20)
    )
    changed = weight.clone()
    found.apply_to(changed)
    assert torch.equal(changed, found.unpack()) and torch.equal(found.applied(weight), changed)


@pytest.mark.parametrize("steps", [False, True])
def test_as_files_hold_it(steps):
    weight = nearest((5, 70), steps=steps)
    stored = weight.stored()
    assert set(stored) == {f"packed_{part}" for part in ("codes", "scales", *["steps"] * steps)}
    assert stored["packed_scales"].dtype == torch.uint8 and stored["packed_scales"].shape == (10,)
    assert sum(part.nbytes for part in stored.values()) == weight.nbytes == quantized_bytes((5, 70), 4, steps)


def damage(weight, part, index, value) -> QuantizedWeight:
    spoilt = getattr(weight, part).clone()
    spoilt[index] = value
    return replace(weight, **{part: spoilt})


@pytest.mark.parametrize("part, index, value, message", [
    ("scales", 1, torch.nan, "its scales reach from nan to nan: expected finite, at least 0"),
    ("scales", 1, torch.inf, "its scales reach from .* to inf"),
    ("scales", 1, -1.0, "its scales reach from -1.0 to"),
    ("scales", 1, 1e38, r"allow elements of .*: expected at most 3.4e\+38, the largest of torch.float32"),
    ("steps", 2, 0.0, "its steps reach from 0.0 to 1.0: expected finite, above 0"),
    ("steps", 2, torch.nan, "its steps reach from nan"),
])  # fmt: skip
def test_damaged_contents(part, index, value, message):
    weight = replace(nearest((3, 5)), steps=torch.ones(5).bfloat16())
    weight.check()
    with pytest.raises(ValueError, match=message):
        damage(weight, part, index, value).check()


def test_damaged_bytes():
    with pytest.raises(ValueError, match="its codes have -128 among them: expected -127 to 127"):
        damage(nearest((300, 5), 8), "codes", (299, 4), -128).check()


@pytest.mark.parametrize("index, value", [((0, 0, 0, 8), 0x10), ((0, 1, 0, 0), 2), ((0, 0, 1, 31), 0xF0)])
def test_bits_past_the_last_row_and_column_change_nothing(index, value):
    """Of 40 rows the last 8 are in high halves."""
    weight, x = nearest((40, 5)), torch.randn(2, 5)
    other = damage(weight, "codes", index, weight.codes[index].item() | value)
    assert torch.equal(other.unpack(), weight.unpack()) and torch.equal(other.linear(x), weight.linear(x))


@pytest.mark.parametrize("change, message", [
    ({"scales": torch.ones(3)}, r"its scales have dtype torch.float32 and shape \[3\]: expected torch.bfloat16 and \[3\]"),
    ({"steps": torch.ones(3).bfloat16()}, r"its steps have dtype torch.bfloat16 and shape \[3\]: expected torch.bfloat16"),
    ({"codes": torch.zeros(1, 1, 4, 32, dtype=torch.uint8)}, "its codes have dtype torch.uint8 and shape"),
    ({"codes": torch.zeros(1, 2, 9, 32, dtype=torch.uint8)}, "its codes have"),
    ({"dtype": torch.float64}, "its dtype is torch.float64: expected one of"),
    ({"shape": (3,)}, r"its shape is \(3,\): expected a list of 2 to 8"),
    ({"shape": (3, -5)}, "its shape is"),
])  # fmt: skip
def test_damaged_headers(change, message):
    weight = nearest((3, 5))
    weight.check()
    with pytest.raises(ValueError, match=message):
        replace(weight, **change).check()
