"""What packed modules hold after their buffers were loaded, set or emptied: checked parts, or an error."""

import copy
import dataclasses

import pytest
import torch
from several_processes import in_processes
from torch import distributed, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_neuronal import densify, evaluate_perplexity, sparsify
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.packed_embedding import PackedEmbedding
from optimum_neuronal.packed.packed_linear import PackedLinear
from optimum_neuronal.packed.packing import pack_weight


def sparse(rows=8, columns=192):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    weight[weight.abs() < 0.8] = 0
    return weight


def modules():
    linear = nn.Linear(192, 8, bias=False).bfloat16().requires_grad_(False)
    linear.weight.copy_(sparse())
    yield PackedLinear.from_linear(linear).eval()
    yield PackedLinear(with_steps()).eval()
    yield PackedEmbedding(QuantizedWeight.nearest(sparse()), nn.Embedding(8, 192)).eval()


def with_steps(bits=3):
    plain = QuantizedWeight.nearest(sparse(), bits)
    return dataclasses.replace(plain, steps=torch.linspace(0.5, 1, 192).bfloat16())


@pytest.fixture(params=range(3), ids=["sparse", "quantised", "embeddings"])
def module(request):
    return list(modules())[request.param]


def compute(module):
    if isinstance(module, PackedEmbedding):
        return module(torch.arange(8))
    return module(torch.ones(2, 192, dtype=torch.bfloat16))


def damages(module):
    """State dicts that do not fit the module, by what is wrong with them."""
    for name in module.owned:
        good = dict(module.state_dict())
        part = good.pop(name)
        yield f"without {name}", good
        yield f"{name} as complex numbers", {**good, name: part.to(torch.complex64)}
        yield f"{name} without dimensions", {**good, name: part.new_zeros(())}
        if name in ("offsets", "bits"):
            yield f"{name} with flipped bits", {**good, name: part.index_put((torch.tensor(0),), part[0] ^ 1)}
        if name == "offsets":
            yield "offsets far behind", {**good, name: part + 10**9}
        if len(part) > 3:
            yield f"three of {name}", {**good, name: part[:3]}


def test_a_refused_state_dict_changes_nothing(module):
    expected, before = compute(module), copy.deepcopy(module.state_dict())
    tried = list(damages(module))
    assert len(tried) >= 8
    for why, damaged in tried:
        for assign in (False, True):
            with pytest.raises(RuntimeError, match="is damaged"):
                module.load_state_dict(damaged, strict=False, assign=assign)
            assert all(torch.equal(before[name], part) for name, part in module.state_dict().items()), why
            assert torch.equal(compute(module), expected), why
    module.load_state_dict(before, assign=True)
    assert torch.equal(compute(module), expected)


def test_an_emptied_module_computes_nothing_until_it_is_loaded(module):
    expected, state = compute(module), copy.deepcopy(module.state_dict())
    for device in ("cpu", "meta"):
        module.to("meta") if device == "meta" else None
        module.to_empty(device="cpu")
        assert not module.checked
        if "offsets" in module.owned:
            module.offsets.fill_(10**9)  # what such memory may hold
            with pytest.raises(RuntimeError, match=r"load_state_dict\(\)"):
                compute(module)
        module.load_state_dict(state)
        assert module.checked and torch.equal(compute(module), expected)
    assert module.float().bfloat16().checked, "conversions keep what was checked"


def test_buffers_that_are_set_are_checked_before_they_are_used():
    module = next(modules())
    expected = compute(module)
    module.values = module.values[:3].clone()
    with pytest.raises(RuntimeError, match="values, but 3 are stored"):
        compute(module)
    module = next(modules())
    module.values = module.values.clone()
    assert torch.equal(compute(module), expected) and module.checked


def test_forward_mode_derivatives_are_refused(module):
    if isinstance(module, PackedEmbedding):
        pytest.skip("its inputs have no derivatives")
    x = torch.ones(2, 192, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="compute no gradients"):
        torch.func.jvp(module, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="compute no gradients"):
        module(forward_ad.make_dual(x, x))
    assert torch.equal(module(x), compute(module))


def test_the_length_of_a_packed_weight_is_that_of_the_dense_one():
    for module in modules():
        assert len(module.weight) == 8


@pytest.mark.parametrize("shape", [(4, 0), (0, 4)])
def test_weights_without_rows_or_columns(shape):
    rows, columns = shape
    packed = PackedLinear(pack_weight(torch.zeros(shape), False), torch.arange(4.0)[:rows]).eval()
    assert torch.equal(packed(torch.ones(2, 3, columns)), torch.arange(4.0)[:rows].expand(2, 3, rows))


@pytest.mark.parametrize("tied", [False, True])
def test_perplexity_with_a_head_in_8_bits(tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    ids = torch.randint(0, 64, (2, 16))
    model = sparsify(model, embedding_bits=8)
    rounded = evaluate_perplexity(densify(copy.deepcopy(model)), None, ids)
    assert evaluate_perplexity(model, None, ids) == pytest.approx(rounded, rel=1e-2)


def test_other_bits_take_the_place_of_a_weight():
    source, target = PackedLinear(with_steps(4)).eval(), PackedLinear(with_steps(2)).eval()
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert torch.equal(target.dense(), source.dense()) and torch.equal(compute(target), compute(source))


def test_a_matrix_is_made_once(module):
    """A call costs no more than it must: the matrix of unchanged buffers is kept, and no copy shares it."""
    assert module.matrix is module.matrix
    other = copy.deepcopy(module)
    assert other.matrix is not module.matrix
    module.float()
    assert module.matrix.dtype == torch.float32 and other.matrix.dtype == torch.bfloat16


def _broadcast_in_two(rank, count):
    """The second process holds other weights: DistributedDataParallel gives it those of the first, before each forward too."""
    for module in modules():
        expected = compute(module)
        width = expected.shape[-1]
        trained = nn.Linear(width, 1).bfloat16()
        x = torch.arange(8) if isinstance(module, PackedEmbedding) else torch.ones(2, 192, dtype=torch.bfloat16)
        if rank:
            getattr(module, "scales" if "scales" in module.owned else "values").zero_()
        model = DistributedDataParallel(nn.Sequential(module, trained), broadcast_buffers=True)
        model.train()
        module.eval()
        model(x).sum().backward()
        assert torch.equal(compute(module), expected) and trained.weight.grad is not None
        distributed.barrier()


def test_buffers_are_broadcast_by_distributed_data_parallel(tmp_path):
    in_processes(2, _broadcast_in_two, tmp_path)
