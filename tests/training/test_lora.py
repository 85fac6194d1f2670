import copy

import pytest
import torch
from conftest import make_model
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from sparse import make_sparse, same_zeros, step, zeros_of
from torch.nn.functional import linear

from optimum_neuronal import keep_lora_sparse, keep_sparsity


CASES = {
    "lora": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_dropout": 0.1}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "lora_dropout": 0.1}),
    "bias": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True}),
    "mixture": ("mixtral", {"target_modules": ["q_proj"]}),
}


def adapted(case, **overrides):
    family, fields = CASES[case]
    torch.manual_seed(0)
    return get_peft_model(make_sparse(family), LoraConfig(r=4, **{**fields, **overrides}))


def train(model, ids, steps=2):
    model.train()
    torch.manual_seed(0)  # dropout
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.9)
    for _ in range(steps):
        step(model, optimizer, ids[:4])
    return model.eval()


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids[:4]).logits


@pytest.mark.parametrize("case", CASES)
def test_merging_changes_nothing_if_the_forward_was_masked(case, ids, tmp_path):
    model = adapted(case)
    zeros, base = zeros_of(model), copy.deepcopy(model.get_base_model().state_dict())
    dense = train(copy.deepcopy(model), ids)
    keep_lora_sparse(model)
    train(model, ids)
    trained = logits(model, ids)
    assert not torch.allclose(trained, logits(dense, ids), atol=1e-3), "the update of pruned weights was left out"

    model.merge_adapter()
    assert same_zeros(model, zeros)
    torch.testing.assert_close(logits(model, ids), trained, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert same_zeros(model, zeros)
    torch.testing.assert_close(logits(model, ids), trained, rtol=0, atol=1e-5)
    with model.disable_adapter():
        dropped = {key.replace("base_layer.", ""): value for key, value in base.items() if "lora" not in key}
        untouched = make_model(CASES[case][0])
        untouched.load_state_dict(dropped)
        torch.testing.assert_close(logits(model, ids), logits(untouched, ids), rtol=0, atol=1e-5)

    model.save_pretrained(tmp_path)
    reloaded = keep_lora_sparse(PeftModel.from_pretrained(untouched, tmp_path))
    torch.testing.assert_close(logits(reloaded, ids), trained, rtol=0, atol=1e-5)
    merged = model.merge_and_unload(safe_merge=case == "lora")
    torch.testing.assert_close(logits(merged, ids), trained, rtol=0, atol=1e-5)
    assert same_zeros(merged, zeros)
    assert not any("lora" in name for name in merged.state_dict())


@pytest.mark.parametrize("case", ["lora", "transposed"])
def test_a_merge_that_keeps_zeros_is_otherwise_that_of_peft(case, ids):
    model = adapted(case)
    zeros = zeros_of(model)
    kept = keep_lora_sparse(copy.deepcopy(model), exact=False)
    for each in (model, kept):
        train(each, ids, steps=1)
    assert torch.equal(logits(model, ids), logits(kept, ids)), "the forward is PEFT's"
    expected = model.merge_and_unload().state_dict()
    merged = kept.merge_and_unload().state_dict()
    for key, value in expected.items():
        assert torch.equal(merged[key], value.masked_fill(zeros[key], 0) if key in zeros else value), key


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
OTHERS = {
    "loha": ("llama", LoHaConfig(r=4, target_modules=["q_proj", "up_proj"], init_weights=False)),
    "dora": ("llama", LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)),
    "experts": ("mixtral", LoraConfig(r=4, target_parameters=EXPERTS, init_lora_weights=False)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_keeper_restores_the_zeros_that_other_adapters_fill(case, caplog):
    family, config = OTHERS[case]
    model = get_peft_model(make_sparse(family), config)
    zeros = zeros_of(model)
    with pytest.raises(ValueError, match=r"LoRA and rsLoRA of linear layers only, .* keeper.apply\(\) after it"):
        keep_lora_sparse(model)
    keeper = keep_sparsity(model)
    assert "call the keeper's apply() after merging" in caplog.text
    merged = model.merge_and_unload()
    assert not same_zeros(merged, zeros)
    keeper.apply()
    assert same_zeros(merged, zeros)


def test_gradients_are_those_of_the_masked_update(ids):
    """Against the formula, through a gradient checkpoint too."""
    model = keep_lora_sparse(adapted("lora", init_lora_weights=False))
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight = layer.get_base_layer().weight
    expected = linear(x, weight + (weight != 0) * (b @ a) * 2)  # lora_alpha / r = 8 / 4
    torch.testing.assert_close(layer(x), expected)
    gradients = torch.autograd.grad(layer(x).square().sum(), (a, b))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), (a, b)))
    checkpointed = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(checkpointed.square().sum(), (a, b)), gradients)


def test_a_base_model_in_bfloat16(ids):
    base = make_sparse().bfloat16()
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = keep_lora_sparse(get_peft_model(base, config))
    trained = logits(model, ids)
    merged = model.merge_and_unload()
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(logits(merged, ids), trained, rtol=0, atol=0.05)


def test_keep_sparsity_lets_lora_keep_zeros_when_merged(ids):
    model = adapted("lora")
    zeros = zeros_of(model)
    with keep_sparsity(model):
        train(model, ids)
    merged = model.merge_and_unload()
    assert same_zeros(merged, zeros)
    model = keep_lora_sparse(adapted("lora", init_lora_weights=False))
    before = logits(model, ids)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    keep_sparsity(model)
    assert torch.equal(logits(model, ids), before), "what was exact stays so"
    keep_lora_sparse(model, exact=False)
    assert not torch.allclose(logits(model, ids), before, atol=1e-3)


def test_a_warning_before_training_says_that_merging_will_change_the_model(caplog):
    """Unless keep_lora_sparse was called."""
    for exact in (True, False):
        keep_sparsity(keep_lora_sparse(adapted("lora"), exact=exact))
    assert not caplog.messages
    keep_sparsity(adapted("lora"))
    (message,) = caplog.messages
    assert "the merged model will differ" in message and "keep_lora_sparse(model) before" in message


def test_several_adapters(ids):
    model = adapted("rslora", init_lora_weights=False)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    keep_lora_sparse(model)
    model.base_model.set_adapter(["default", "other"])
    zeros = zeros_of(model.eval())
    trained = logits(model, ids)
    model.merge_adapter()
    torch.testing.assert_close(logits(model, ids), trained, rtol=0, atol=1e-5)
    assert same_zeros(model, zeros)
    model.unmerge_adapter()
    mixed = model(input_ids=ids[:2], adapter_names=["default", "other"]).logits
    for row, name in enumerate(["default", "other"]):
        model.set_adapter(name)
        torch.testing.assert_close(mixed[row], model(input_ids=ids[row : row + 1]).logits[0], rtol=0, atol=1e-5)


def test_errors(llama):
    merged = adapted("lora")
    merged.merge_adapter()
    elsewhere = get_peft_model(make_sparse(), LoraConfig(target_modules=["embed_tokens"]))
    for model, message in (
        (make_sparse(), "call keep_lora_sparse on the result of peft.get_peft_model"),
        (get_peft_model(llama, LoraConfig(target_modules=["q_proj"])), "dense"),
        (elsewhere, "No adapter updates a pruned weight"),
        (merged, "merged already"),
    ):
        with pytest.raises(ValueError, match=message):
            keep_lora_sparse(model)
