import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from optimum_neuronal.formats import bitmask as packing
from optimum_neuronal.formats.bitmask import pack, packed_bytes, saves_space, unpack


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)
FUZZ = examples(100)


@pytest.fixture(scope="module", autouse=True, params=["kernel", "numpy"])
def unpacking_by(request):
    """Compiled code, where there is any, and numpy."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(packing, "find_kernel", lambda: None)
        elif packing.find_kernel() is None:
            pytest.skip("there are no compiled kernels")
        yield


def bits(weight):
    return weight.view(packing.INTEGERS[weight.element_size()])


def test_known_bytes():
    """Element i is bit i % 8, from the lowest, of byte i // 8; values follow in row-major order."""
    weight = torch.tensor([[0, 1.5, 0, 0, 2], [0, 0, 0, 0, -3]])
    mask, values = pack(weight)
    assert mask.tolist() == [0b00010010, 0b00000010] and values.tolist() == [1.5, 2, -3]
    assert torch.equal(unpack(mask, values, (2, 5)), weight)
    assert pack(weight.T)[1].tolist() == [1.5, 2, -3], "row-major in the view's own order"
    assert pack(weight.T.contiguous())[0].tolist() == pack(weight.T)[0].tolist() == [0b100, 0b11]
    assert not any(part.requires_grad for part in pack(torch.nn.Parameter(weight)))


@FUZZ
@given(
    shape=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.1, 0.5, 1]),
    seed=st.integers(0, 1000),
)
def test_any_bits_come_back(shape, dtype, density, seed):
    """Of all floats: NaN with its payload, infinity, subnormal numbers and -0.0 too."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8)
    raw[torch.rand(shape, generator=generator) >= density] = 0
    raw.view(-1)[:size] = torch.tensor([0] * (size - 1) + [128], dtype=torch.uint8)  # -0.0
    weight = raw.view(dtype).view(shape)
    mask, values = pack(weight)
    assert mask.nbytes + values.nbytes == packed_bytes(weight.numel(), int((bits(weight) != 0).sum()), size)
    again = unpack(mask, values, shape)
    assert again.dtype == dtype and torch.equal(bits(again), bits(weight))


def test_nothing_to_keep():
    for shape in ((0, 5), (3, 0), (3, 5)):
        assert torch.equal(unpack(*pack(torch.zeros(shape)), shape), torch.zeros(shape))


def test_more_than_one_chunk(monkeypatch):
    monkeypatch.setattr(packing, "CHUNK", 64)
    weight = torch.randn(37, 29).masked_fill(torch.rand(37, 29) < 0.7, 0)
    mask, values = pack(weight)
    assert torch.equal(unpack(mask, values, weight.shape), weight)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip((mask, values), pack(weight)))
    monkeypatch.setattr(packing, "CHUNK", 64)
    assert torch.equal(unpack(mask, values, weight.shape), weight)


def test_the_size_that_is_promised():
    """At 70 % in bfloat16 at most 0.37 of the dense bytes."""
    weight = torch.randn(64, 100).bfloat16()
    weight.view(-1)[: 64 * 70] = 0
    mask, values = pack(weight)
    assert mask.nbytes + values.nbytes == 0.3625 * weight.nbytes


def test_what_is_packed():
    sparse = torch.randn(8, 16)
    sparse[:, :4] = 0
    assert saves_space(sparse) and saves_space(sparse.view(2, 4, 16)) and saves_space(sparse.bfloat16())
    assert not saves_space(torch.randn(8, 16)), "a mask alone would make it larger"
    assert not saves_space(sparse.view(-1)) and not saves_space(sparse.int()), "a bias, an integer buffer"


def test_parts_that_disagree():
    mask, values = pack(torch.tensor([[0, 1.0, 0], [2, 0, 0]]))
    for shape, mask_, values_, message in [
        ((2, 3), mask, values[:1], "keeps 2 values, but 1 are stored"),
        ((2, 3), mask | 64, torch.ones(3), "bits set behind the weight's 6 elements"),
        ((3, 3), mask, values, r"expected torch.uint8 and \[2\]"),
        ((2, 3), mask.int(), values, "expected torch.uint8"),
        ((2, 3), mask, values.int(), "expected a floating one"),
        ((2, 3), mask, torch.ones(7), "at most 6"),
        ((2, -3), mask, values, "expected a list of 2 to 8 whole numbers"),
        ((2**40, 2**40), mask, values, "bitmask has"),  # and nothing is allocated
        ((6,), mask, values, "expected a list of 2 to 8 whole numbers"),
        ((2, 3.0), mask, values, "expected a list of 2 to 8 whole numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            unpack(mask_, values_, shape)
