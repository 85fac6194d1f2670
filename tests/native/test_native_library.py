import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_checks import FAR, any_bits, bits, check_product, far_behind, finite, kernels
from profiles import examples

from optimum_neuronal.native import library
from optimum_neuronal.native.build import BuildError
from optimum_neuronal.packed import packed_weight
from optimum_neuronal.packed.packed_weight import DTYPES, PackedWeight


FUZZ = examples(60)


@pytest.fixture
def choosing_anew():
    remembered = (library.find_kernel, library.compiled_kernels)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def make_weight(out, columns, dtype, density, seed=0) -> torch.Tensor:
    weight = finite((out, columns), dtype, density, seed)
    weight[1::5], weight[3::5] = 0, 1  # empty and full rows
    return weight


def parts(weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return PackedWeight.pack(weight).tensors()


@FUZZ
@given(
    out=st.integers(1, 70),
    columns=st.integers(1, 200) | st.sampled_from([64, 320]),
    count=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.02, 0.3, 0.5, 1]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products(out, columns, count, dtype, density, with_bias, seed):
    weight = make_weight(out, columns, dtype, density, seed)
    x = make_weight(count, columns, dtype, 1, seed + 1)  # with a row of zeros
    bias = torch.randn(out).to(dtype) if with_bias else None
    for kernel in kernels():
        check_product(kernel.multiply(x, *parts(weight), bias), x, weight, bias)


@examples(12)
@given(
    share=st.sampled_from([0.5, 1, 1e-3, 1e-5]),
    columns=st.sampled_from([1, 63, 128, 300, 1100]),
    count=st.integers(1, 8),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 100),
)
@example(share=0.5, columns=300, count=3, dtype=torch.bfloat16, seed=0)
def test_finite_products_stay_finite(share, columns, count, dtype, seed):
    """Inputs near the largest number, in the first row of x alone; other rows and small numbers beside it stay as exact."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, columns, generator=generator) * (0.1 / columns)
    weight[torch.rand(7, columns, generator=generator) < 0.5] = 0
    x = torch.randn(count, columns, generator=generator)
    x[0] = x[0].sign() * share * torch.finfo(torch.bfloat16).max
    packed, x = PackedWeight.pack(weight.to(dtype)), x.to(dtype)
    products = [(kernel.name, kernel.multiply(x, *packed.tensors(), None)) for kernel in kernels()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_weight, "find_kernel", lambda: None)
        products.append(("torch", packed.multiply(x)))
    for kernel, y in products:
        assert y.isfinite().all(), kernel
        check_product(y, x, packed.to_dense(), None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_threads_nor_other_rows_change_a_bit(dtype):
    tensors, x = parts(make_weight(701, 1000, dtype, 0.3)), make_weight(8, 1000, dtype, 1, 1)
    before = torch.get_num_threads()
    for kernel in kernels():
        results = [torch.cat([kernel.multiply(row[None], *tensors, None) for row in x])]
        try:
            for threads in (1, 2, (os.cpu_count() or 1) + 3):
                torch.set_num_threads(threads)
                results.append(kernel.multiply(x, *tensors, None))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(bits(result), bits(results[0])) for result in results), kernel.name


@FUZZ
@given(
    out=st.integers(1, 40),
    columns=st.integers(1, 200) | st.sampled_from([64, 4096, 5000]),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
)
def test_dense_copies_are_bit_equal(out, columns, dtype, density, seed):
    """Of any bits: NaN with its payload, infinity, subnormal numbers and -0.0 too."""
    weight = any_bits((out, columns), dtype, density, seed)
    for kernel in kernels():
        dense = torch.full_like(weight, 7)
        kernel.to_dense(*parts(weight), dense)
        assert torch.equal(bits(dense), bits(weight)), kernel.name


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_behind_two_to_the_31(dtype, tmp_path):
    weight, x = make_weight(9, 200, dtype, 0.3), make_weight(3, 200, dtype, 1, 1)
    mask, values, offsets = parts(weight)
    many = far_behind(values, tmp_path)
    for kernel in kernels():
        dense = torch.full_like(weight, 7)
        kernel.to_dense(mask, many, offsets + FAR, dense)
        assert torch.equal(bits(dense), bits(weight)), kernel.name
        near = kernel.multiply(x, mask, values, offsets, None)
        assert torch.equal(bits(kernel.multiply(x, mask, many, offsets + FAR, None)), bits(near)), kernel.name


def test_the_variable_forces_a_kernel(monkeypatch, choosing_anew):
    here = {kernel.name for kernel in kernels()}
    for name in (*library.KERNELS, "sse"):
        library.find_kernel.cache_clear()
        monkeypatch.setenv(library.VARIABLE, name)
        if name in here:
            assert library.find_kernel().name == name
        else:
            message = f"is '{name}': expected one of portable, .*, torch, which this processor can run"
            with pytest.raises(ValueError, match=message):
                library.find_kernel()
    library.find_kernel.cache_clear()
    monkeypatch.setenv(library.VARIABLE, "torch")
    monkeypatch.setattr(library.logger, "warning", pytest.fail)
    assert library.find_kernel() is None


def test_one_warning_without_kernels(monkeypatch, choosing_anew):
    def fail():
        raise BuildError("no C compiler was found")

    monkeypatch.setattr(library, "installed_library", lambda: library.Path("missing"))
    monkeypatch.setattr(library, "cached_library", fail)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    warnings = []
    monkeypatch.setattr(library.logger, "warning", warnings.append)
    assert library.find_kernel() is None and library.find_kernel() is None
    assert len(warnings) == 1 and "no C compiler was found. torch takes over" in warnings[0]
    library.find_kernel.cache_clear()
    monkeypatch.setenv(library.VARIABLE, "portable")
    with pytest.raises(ValueError, match="but there are no compiled kernels: no C compiler was found"):
        library.find_kernel()
    described = library.describe_environment()
    assert described["kernels that run here"] == "none: no C compiler was found"
    assert described["kernel in use"].startswith("none: ")


def test_a_damaged_library(tmp_path, monkeypatch, choosing_anew):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    for name in ("installed_library", "cached_library"):
        monkeypatch.setattr(library, name, lambda: broken)
    assert "the compiled kernels cannot be loaded" in str(library.compiled_kernels())


FORK = """
import os, sys, torch
from optimum_neuronal.native.library import find_kernel
from optimum_neuronal.packed.packed_weight import PackedWeight
torch.set_num_threads(2)
packed = PackedWeight.pack(torch.eye(600, 640))
x, kernel = torch.randn(2, 640), find_kernel()
before = kernel.multiply(x, *packed.tensors(), None)
if os.fork() == 0:
    os._exit(0 if torch.equal(kernel.multiply(x, *packed.tensors(), None), before) else 1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_computes_too():
    kernels()
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)
