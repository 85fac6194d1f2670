"""What only computes works with packed weights as with dense ones."""

import copy

import pytest
import torch
from conftest import FEW
from packed_models import assert_close, logits, make_zeroed
from profiles import NIGHT, by_day
from transformers import CompileConfig

from optimum_neuronal import NeuronALConfig, NeuronALPruner, sparsify
from optimum_neuronal.demo.run import load_tiny_model


FAMILIES = (*FEW, "qwen3_moe", "gpt_oss")
GREEDY = dict(max_new_tokens=40 if NIGHT else 16, do_sample=False, pad_token_id=0, eos_token_id=None)


def pair(family="llama", **overrides):
    dense = make_zeroed(family, **overrides)
    return dense, sparsify(copy.deepcopy(dense))


@pytest.mark.parametrize("family", by_day(FAMILIES, "llama", "gpt2", "mixtral", "gpt_oss"))
def test_generate(family):
    """Greedy tokens are the same, of one sequence and of a batch with padding, with growing and with static caches."""
    dense, packed = pair(family)
    one = torch.tensor([[5, 7, 11]])
    assert torch.equal(dense.generate(one, **GREEDY), packed.generate(one, **GREEDY))
    batch, mask = torch.tensor([[0, 0, 3, 9], [4, 8, 15, 16]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    tokens, expected = (m.generate(batch, attention_mask=mask, **GREEDY) for m in (packed, dense))
    assert torch.equal(tokens, expected)


@pytest.fixture(scope="module")
def trained():
    """The demo's model at 70 %: unlike random weights it is sure of its tokens, or torn between some."""
    model, tokenizer = load_tiny_model()
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    return NeuronALPruner(config).prune(model), tokenizer("The", return_tensors="pt").input_ids


def test_tokens_of_a_trained_model(trained):
    dense, ids = trained
    new = 200 if NIGHT else 60
    options = {**GREEDY, "max_new_tokens": new}
    expected = dense.generate(ids, **options)
    assert expected.shape[1] == ids.shape[1] + new
    assert torch.equal(sparsify(copy.deepcopy(dense)).generate(ids, **options), expected)


@pytest.mark.parametrize("family", by_day(FAMILIES, "llama", "gpt2", "mixtral"))
def test_compiled_whole(family, ids):
    torch._dynamo.reset()
    _, packed = pair(family, num_hidden_layers=1)
    expected = logits(packed, ids)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("family", by_day(FAMILIES, "mixtral"))
def test_generate_compiles_whole_with_a_static_cache(family):
    """As it does on GPUs unasked."""
    torch._dynamo.reset()
    dense, packed = pair(family, num_hidden_layers=1)
    graphs, ids = [], torch.tensor([[5, 7, 11]])
    config = CompileConfig(fullgraph=True, backend=lambda g, inputs: graphs.append(g) or g.forward, mode=None)
    config._compile_all_devices = True
    tokens = packed.generate(ids, cache_implementation="static", compile_config=config, **GREEDY)
    assert graphs and torch.equal(tokens, dense.generate(ids, **GREEDY))


def test_outputs_can_be_changed_in_place(ids):
    """As Falcon does, also while gradients reach the inputs."""
    dense, packed = pair("falcon")
    assert_close(packed(input_ids=ids).logits.detach(), dense(input_ids=ids).logits.detach())
