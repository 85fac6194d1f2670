import pytest
import torch
from conftest import make_model
from peft import LoraConfig, get_peft_model
from sparse import make_sparse, zeros_of
from torch import nn

from optimum_neuronal import NeuronALConfig, NeuronALPruner, keep_lora_sparse, keep_sparsity
from optimum_neuronal.compat.peft import without_adapters
from optimum_neuronal.training.sparse_weights import find_sparse_weights


def found(model):
    return {weight.name: ~weight.mask.unpack() for weight in find_sparse_weights(model)}


def assert_same(masks, expected):
    assert masks.keys() == expected.keys() and all(torch.equal(masks[name], expected[name]) for name in masks)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_masks_are_the_zeros(family):
    """Also if the model was pruned elsewhere."""
    model = make_sparse(family)
    zeros = {name.removesuffix(".weight"): zero for name, zero in zeros_of(model).items()}
    assert_same(found(model), zeros)
    del model.config.sparsity_config
    assert_same(found(model), zeros)


def test_bits_of_a_mask_move_once():
    """With the model, to an accelerator, which the device "meta" stands for."""
    (weight, *_) = find_sparse_weights(make_sparse("llama"))
    assert weight.masked(torch.ones(weight.mask.shape, device="meta")).device.type == "meta"
    assert weight.mask.bits.device.type == "meta"


def test_every_zero_is_kept_whatever_was_to_be_pruned():
    """In linear layers of unknown names, and in single experts, too; a weight without zeros needs no mask."""
    model = make_model("mixtral")
    model.model.layers[0].novel = nn.Linear(32, 32)
    targets = [r"experts\.[12]\.", "q_proj", "novel"]
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform", targets=targets, ignore=["layers.2"])
    NeuronALPruner(config).prune(model)
    model.model.layers[0].mlp.experts.down_proj.data[0, 0] = 0  # by chance
    model.config.sparsity_config["config"].update(targets=["([a-z0-9._]+)+#", "("])
    assert_same(found(model), {name.removesuffix(".weight"): zero for name, zero in zeros_of(model, 0).items()})
    assert len(found(model)) == 7


def test_zeros_that_are_lost_raise_and_further_ones_count():
    model = make_sparse()
    weight = model.model.layers[1].mlp.up_proj.weight
    place = (weight.data.view(-1) == 0).nonzero()[0]
    weight.data.view(-1)[place] = 1.0
    with pytest.raises(ValueError, match="says that 18,267 weights are zero, but 18,266 are: 1 zeros were lost since"):
        find_sparse_weights(model)
    weight.data[:4] = 0
    assert found(model)["model.layers.1.mlp.up_proj"][:4].all()
    model.config.sparsity_config |= {"version": 2}
    with pytest.raises(ValueError, match="sparsity_config"):
        find_sparse_weights(model)


def test_inside_of_wrappers_and_under_adapters():
    model = make_sparse("mixtral")
    expected = found(model)
    compiled = nn.Module()  # what torch.compile returns holds the model so; to import the compiler takes seconds
    compiled._orig_mod = model
    for wrapped in (nn.DataParallel(model), compiled):
        assert found(wrapped).keys() == expected.keys()
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts))
    names = [name for name, _ in peft_model.named_modules()]
    for adapted in (peft_model, model):
        assert_same(found(adapted), expected)
    with without_adapters(model):
        assert not any("lora" in name for name, _ in model.named_modules())
    assert [name for name, _ in peft_model.named_modules()] == names


def test_weights_that_hide_their_zeros():
    for change, message in [
        (lambda weight: nn.Parameter(weight.to("meta")), "not in memory"),
        (lambda weight: nn.Parameter(weight.to(torch.uint8), requires_grad=False), "of dtype torch.uint8"),
    ]:
        model = make_sparse()
        module = model.model.layers[0].mlp.up_proj
        module.weight = change(module.weight)
        with pytest.raises(ValueError, match=f"model.layers.0.mlp.up_proj are {message}"):
            find_sparse_weights(model)


def test_a_copy_of_a_projection_that_peft_trains():
    for saved in ("up_proj", "mlp"):
        model = make_sparse()
        copied = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=[saved]))
        for keep in (keep_sparsity, keep_lora_sparse):
            with pytest.raises(ValueError, match=r"a copy of model.layers.0.mlp.\w+ \(modules_to_save\)"):
                keep(copied)
