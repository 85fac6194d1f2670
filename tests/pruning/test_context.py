import pytest
import torch
import transformers
from conftest import make_model
from families import FAMILIES

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.pruning.context import check, check_structure


def skeleton():
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("llama", **FAMILIES["llama"].config)
        return transformers.AutoModelForCausalLM.from_config(config)


def config(**fields):
    return NeuronALConfig(**{"saliency": "wanda", "sparsity": 0.5, "topup": "uniform", **fields})


def test_the_decoder_that_is_found_is_the_one_to_prune(llama):
    decoder = check(llama, config(targets=["mlp"], ignore=["down_proj"])).decoder
    assert list(decoder.projections) == [f"model.layers.{i}.mlp.{n}_proj" for i in range(3) for n in ("gate", "up")]


def test_weights_are_looked_at_last():
    """So that what is wrong with the structure is told before they are read."""
    assert len(check_structure(skeleton(), config()).decoder.projections) == 3 * 7
    with pytest.raises(ValueError, match="are on the meta device"):
        check(skeleton(), config())


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"targets": ["qqq"]}, "match no projection"),
        ({"sparsity": 0.8, "pattern": "2:10"}, "32 input features, not a multiple of 10"),
        ({"seq_length": 1000}, "admits 1 to 64 tokens"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_without_weights(fields, message):
    with pytest.raises(ValueError, match=message):
        check_structure(skeleton(), config(**fields))


def test_a_topup_may_refuse_the_model(own_topup, monkeypatch):
    def refuse(self, decoder):
        raise ValueError(f"not with {len(decoder.blocks)} blocks")

    monkeypatch.setattr(own_topup, "check", refuse)
    with pytest.raises(ValueError, match="not with 3 blocks"):
        check_structure(skeleton(), config(topup="test-only"))


def test_a_sparse_model_is_refused_without_weights():
    model = skeleton()
    model.config.sparsity_config = dict(
        version=1, quant_method="neuronal", format="dense", sparsity=0.5, achieved_sparsity=0.5
    )
    with pytest.raises(ValueError, match="is sparse already .* del model.config.sparsity_config"):
        check_structure(model, config())


def test_weights_that_nobody_can_change(ids):
    with torch.inference_mode():
        model = make_model("llama")
    with pytest.raises(ValueError, match=r"q_proj cannot be changed in place .made under torch.inference_mode\(\)"):
        check(model, config())
    with torch.no_grad():
        check(make_model("llama"), config())


def test_blocks_that_are_compiled_in_place(llama):
    llama.model.layers[1].mlp.compile(backend="eager")
    with pytest.raises(ValueError, match=r"model.layers.1.mlp is compiled in place .*prune the model first"):
        check(llama, config())
