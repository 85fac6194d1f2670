from itertools import product

import pytest
import torch
from coded import coded_tensors, make_coded
from kernel_checks import multiply_by_blocks
from test_ops import error

from optimum_neuronal.formats.codebooks import BITS
from optimum_neuronal.inference import coded_ops, torch_fallback
from optimum_neuronal.inference.activations import to_int8
from optimum_neuronal.inference.packed_rows import DTYPES


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


def test_as_dense():
    for dtype, lead, with_bias in product(DTYPES, [(), (1,), (3,), (2, 5), (40,), (0,)], [False, True]):
        coded = make_coded(37, 133, 4, dtype=dtype)
        x, bias = torch.randn(*lead, 133).to(dtype), torch.randn(37).to(dtype) if with_bias else None
        y = coded_ops.coded_linear(x, *coded_tensors(coded), bias)
        assert y.shape == (*lead, 37) and y.dtype == dtype
        assert not y.numel() or error(y, x, coded.unpack(), bias) < TOLERANCE[dtype]
        y = coded_ops.coded_linear(x, *coded_tensors(coded), bias, True)
        assert y.shape == (*lead, 37) and (not y.numel() or error(y, x, coded.unpack(), bias) < 3e-2)


def test_many_rows_of_x_are_multiplied_block_by_block(monkeypatch):
    """Inputs are not rounded then."""
    for value_bits in BITS:
        coded, x, bias = make_coded(37, 133, value_bits), torch.randn(40, 133), torch.randn(37)
        tensors = coded_tensors(coded)
        with monkeypatch.context() as patch:
            y = multiply_by_blocks(patch, "unpack_coded", coded_ops.coded_linear, x, *tensors, bias, True)
        assert error(y, x, coded.unpack(), bias) < 1e-5


@pytest.mark.parametrize("int8", [False, True])
def test_without_kernels(int8, monkeypatch):
    """The same with torch alone, to the bit where sums are exact."""
    tensors, x = coded_tensors(make_coded(37, 300, 3)), torch.randn(5, 300)
    found = coded_ops.coded_linear(x, *tensors, None, int8)
    monkeypatch.setattr(coded_ops, "find_kernel", lambda: None)
    expected = coded_ops.coded_linear(x, *tensors, None, int8)
    assert torch.equal(found, expected) if int8 else torch.allclose(found, expected, atol=1e-5)
    dense = torch_fallback.unpack_coded(*tensors, 300, torch.bfloat16)
    assert torch.equal(coded_ops.unpack_coded(*tensors, 300, torch.bfloat16), dense)


def test_what_does_not_fit_is_refused():
    parts, x = coded_tensors(make_coded(4, 70, 4)), torch.zeros(1, 70)
    for place, wrong, message in (
        (0, parts[0].int(), "bits of torch.int32"),
        (1, parts[1].to("meta"), "on meta: expected torch.uint8"),
        (2, parts[2][1:], r"offsets of torch.int64 and shape \[4\]"),
        (3, parts[3].bfloat16(), "scales of torch.bfloat16"),
        (4, parts[4][:5], "a table of 5 levels: expected 4, 8, 16 or 0"),
    ):
        with pytest.raises(ValueError, match=message):
            coded_ops.coded_linear(x, *parts[:place], wrong, *parts[place + 1 :])
    for wrong, message in (
        ((x.double(), *parts), "cannot be computed in torch.float64"),
        ((x[:, :5], *parts), "for 5 columns"),
        ((torch.zeros(1, 300), *parts), "for 300 columns"),
        ((x, *parts, torch.zeros(3)), r"the bias is torch.float32 of shape \[3\]"),
        ((torch.tensor(1.0), *parts), "x has no dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            coded_ops.coded_linear(*wrong)
    with pytest.raises(ValueError, match="cannot be computed in torch.int8"):
        coded_ops.unpack_coded(*parts, 70, torch.int8)


def test_torch_compile_keeps_its_graph_whole():
    coded = make_coded(16, 64, 4)
    parts, x = coded_tensors(coded), torch.randn(2, 64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        return coded_ops.coded_linear(x + 1, *parts) + coded_ops.unpack_coded(*parts, 64, torch.float32).sum()

    weight = coded.unpack()
    assert torch.allclose(compiled(x), torch.nn.functional.linear(x + 1, weight) + weight.sum(), atol=1e-5)


def test_torch_knows_the_operations_well():
    parts = coded_tensors(make_coded(4, 70, 4))
    torch.library.opcheck(torch.ops.optimum_neuronal.coded_linear, (torch.randn(2, 70), *parts, None, True))
    torch.library.opcheck(torch.ops.optimum_neuronal.unpack_coded, (*parts, 70, torch.float32))


def test_inputs_are_rounded_by_groups():
    x = torch.zeros(1, 130)
    x[0, :4] = torch.tensor([254.0, 1.0, 3.0, -5.0])  # in units of 2: halves, to even
    x[0, 129] = -1e-3
    numbers, scales = to_int8(x)
    assert numbers.shape == (1, 2, 128) and scales.shape == (1, 2)
    assert numbers[0, 0, :4].tolist() == [127, 0, 2, -2] and numbers[0, 1, 1] == -127
    assert scales[0, 0] == 2 and scales[0, 1] == torch.tensor(1e-3) / 127
