"""Models of other kinds than language models, from their checkpoints to sparse ones: with their own classes and heads."""

import pytest
import torch
from conftest import make_tokenizer
from kinds import ENCODERS, MULTIMODAL, OTHER_HEADS, UNSUPPORTED, make_config, make_kind
from profiles import by_day
from trial_helpers import state

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.dry_run import dry_run


PRUNED = {**ENCODERS, **OTHER_HEADS, **MULTIMODAL}


def config(**fields) -> NeuronALConfig:
    small = dict(num_samples=4, num_alignment_samples=2, saliency="wanda", topup="neuronal")
    if fields.get("topup", "neuronal") == "neuronal":
        small["topup_args"] = dict(block_lambdas=[0.1], row_lambdas=[0.0, 0.1])
    return NeuronALConfig(0.5, **{**small, **fields})


PRUNED_BY_DAY = (
    "BertForMaskedLM", "DistilBertForMaskedLM", "ModernBertForMaskedLM", "LlamaForSequenceClassification", "Qwen3Model",
    *MULTIMODAL,
)  # fmt: skip


@pytest.mark.parametrize("name", by_day(PRUNED, *PRUNED_BY_DAY))
def test_pruned_as_its_own_class(name, ids, tmp_path):
    model = make_kind(name)
    model.save_pretrained(tmp_path / "dense")
    make_tokenizer().save_pretrained(tmp_path / "dense")
    before = state(model)
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config())
    assert type(pruner.model).__name__ == name
    expected = make_config(name).get_text_config(decoder=True).num_hidden_layers
    assert len(find_decoder(pruner.model).blocks) == expected, "of several modalities the text decoder"
    pruner.quantize(tmp_path / "sparse", dataset=ids)
    assert pruner.report.achieved_sparsity == pytest.approx(0.5, abs=5e-3)
    card = (tmp_path / "sparse" / "README.md").read_text()
    use = card.partition("## Use")[2].partition("```python\n")[2].partition("\n```")[0].replace("path/to/", "")
    names = {}
    exec(use.replace('"sparse"', repr(str(tmp_path / "sparse"))), names)
    reloaded = names["model"]
    assert type(reloaded).__name__ == name, "the code of the card runs, and no head is lost"
    decoder = find_decoder(reloaded)
    pruned = {f"{projection}.weight" for projection in decoder.projections}
    assert pruned
    for key, value in reloaded.state_dict().items():
        assert key in pruned or torch.equal(value, before[key])


@pytest.mark.parametrize("topup", ["atp", "evopress", "search"])
def test_topups_that_compare_outputs_need_a_causal_head(topup, ids):
    model = make_kind("LlamaForSequenceClassification")
    with pytest.raises(ValueError, match="LlamaForSequenceClassification has no causal .* Choose 'neuronal'"):
        NeuronALPruner(config(topup=topup)).prune(model, ids)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_kinds_raise_before_weights_are_read(name, tmp_path):
    make_config(name).save_pretrained(tmp_path)  # no file with weights
    for attempt in (
        lambda: NeuronALPruner.from_pretrained(tmp_path, config=config()),
        lambda: dry_run(tmp_path, config()),
        lambda: NeuronALPruner(config()).prune(make_kind(name)),
    ):
        with pytest.raises(ValueError, match=f"{name}(': no Auto class| reads 'pixel_values'| is an encoder-decoder)"):
            attempt()


def test_a_pooler_is_no_final_norm(ids):
    found = {}
    for name in ("BertModel", "ModernBertForMaskedLM"):
        model = make_kind(name)
        with inference(model):
            found[name] = BlockRunner(find_decoder(model), 1).capture(ids[:1]).final_norm
    assert found["BertModel"] is None and type(found["ModernBertForMaskedLM"]).__name__ == "LayerNorm"


@pytest.mark.parametrize(
    "name, block, chain",
    [
        ("BertModel", "encoder.layer.0", "attention.output.dense intermediate.dense"),
        ("DistilBertForMaskedLM", "distilbert.transformer.layer.0", "attention.k_lin attention.out_lin ffn.lin1 ffn.lin2"),
        ("ModernBertForMaskedLM", "model.layers.0", "attn.Wqkv attn.Wo mlp.Wi mlp.Wo"),
    ],
)  # fmt: skip
def test_what_rows_of_encoders_feed(name, block, chain):
    decoder = find_decoder(make_kind(name))
    names = [f"{block}.{local}" for local in chain.split()]
    for feeding, reader in zip(names, names[1:]):
        own = decoder.blocks[0]
        assert decoder.place_fed_by(own, own.projections[feeding]).name == reader
