import copy

import pytest
import torch
from packed_models import assert_close, logits, make_zeroed
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from sparse import make_sparse, same_zeros, zeros_of

import optimum_neuronal.packed.ops as ops
from optimum_neuronal import densify, keep_lora_sparse, lora_for_packed, sparsify
from optimum_neuronal.packed.packed_module import packed_modules


ATTENTION = ["q_proj", "v_proj"]
CASES = {
    "float32": ("llama", torch.float32, "all-linear"),
    "bfloat16": ("llama", torch.bfloat16, "all-linear"),
    "transposed": ("gpt2", torch.float32, "all-linear"),
    "experts": ("mixtral", torch.float32, ATTENTION),
    "transposed experts": ("gpt_oss", torch.float32, ATTENTION),
}


def adapted(case="float32"):
    """Return a packed model and its dense twin, both with the same random adapters."""
    family, dtype, targets = CASES[case]
    packed = sparsify(make_zeroed(family).to(dtype))
    dense = densify(copy.deepcopy(packed))
    config = LoraConfig(target_modules=targets, init_lora_weights=False)
    packed = get_peft_model(packed, lora_for_packed(packed, config))
    config.fan_in_fan_out = family == "gpt2"
    dense = get_peft_model(dense, config)
    adapters = {name: value for name, value in packed.state_dict().items() if "lora_" in name}
    assert adapters and not dense.load_state_dict(adapters, strict=False).unexpected_keys
    return packed, dense


def gradients(model, ids):
    """Return all gradients of a training step by name."""
    model.zero_grad()
    torch.manual_seed(0)  # dropout
    model.train()(input_ids=ids[:2], labels=ids[:2]).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(gradients, expected, relative=1e-5):
    assert gradients.keys() == expected.keys() and all("lora_" in name for name in gradients)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= relative * gradient.norm(), name


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_outputs_are_those_of_the_dense_model(case, ids, monkeypatch):
    monkeypatch.setattr(ops, "SCRATCH_ROWS", 64)  # so that weights take several blocks
    packed, dense = adapted(case)
    low = CASES[case][1] == torch.bfloat16
    assert_same(gradients(packed, ids), gradients(dense, ids), 2e-2 if low else 1e-5)
    assert_close(logits(packed.eval(), ids), logits(dense.eval(), ids), 5e-2 if low else 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, ids):
    packed, dense = adapted()
    packed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    packed.enable_input_require_grads()
    assert_same(gradients(packed, ids), gradients(dense, ids))


def test_saved_and_loaded_as_any_adapter(ids, tmp_path):
    packed, dense = adapted()
    expected = logits(packed.eval(), ids)
    packed.save_pretrained(tmp_path)
    base = sparsify(make_zeroed())
    without_wrapper = copy.deepcopy(base)
    without_wrapper.load_adapter(str(tmp_path), peft_config=lora_for_packed(without_wrapper, tmp_path))
    for loaded in (
        PeftModel.from_pretrained(base, tmp_path, config=lora_for_packed(base, tmp_path)),
        PeftModel.from_pretrained(make_zeroed(), tmp_path),  # an ordinary adapter
        without_wrapper,
    ):
        torch.testing.assert_close(logits(loaded.eval(), ids), expected, rtol=0, atol=1e-5)
    loaded.set_adapter("default")
    with pytest.raises(ValueError, match="see optimum_neuronal.lora_for_packed"):
        PeftModel.from_pretrained(sparsify(make_zeroed()), tmp_path)


def test_merging_raises_until_the_model_is_dense_and_then_keeps_zeros(ids):
    model = make_sparse()
    zeros = zeros_of(model)
    sparsify(model)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, lora_for_packed(model, config))
    expected = logits(model.eval(), ids)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match=r"packed.*optimum_neuronal.densify\(model\) first.*keep_lora_sparse"):
            merge()
    assert densify(model) is model and next(packed_modules(model), None) is None
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-5)
    merged = keep_lora_sparse(model).merge_and_unload()
    assert same_zeros(merged, zeros) and not hasattr(merged, "packing")
    assert next(packed_modules(sparsify(merged)), None) is not None, "can be packed again"


@pytest.mark.parametrize(
    "config, kind, message",
    [
        (LoraConfig(bias="all"), ValueError, "bias='all': biases of packed layers are not trained"),
        (LoraConfig(target_modules=ATTENTION, use_dora=True), ValueError, "DoraLinearVariant.*LoRA and rsLoRA only"),
        (LoraConfig(init_lora_weights="OLoRA"), ValueError, "'OLoRA' changes the weights"),
        (LoraConfig(modules_to_save=["up_proj"]), ValueError, "modules_to_save names .*up_proj, which is packed"),
        (LoHaConfig(), TypeError, "LoHaConfig: packed weights support LoraConfig only"),
    ],
)
def test_adapters_that_packed_weights_do_not_support(config, kind, message):
    model = sparsify(make_zeroed())
    with pytest.raises(kind, match=message):
        get_peft_model(model, lora_for_packed(model, config))


def test_a_dense_model_needs_no_other_config():
    config = LoraConfig(target_modules="all-linear")
    assert lora_for_packed(make_zeroed(), config) == config and config.target_modules == "all-linear"
