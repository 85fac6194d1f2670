"""What a prune finds: against masks and weights by hand, on disk, after a crash, whatever the batch."""

from itertools import product

import pytest
import torch
from conftest import FEW, make_model, make_model_on_disk, memory_of
from forward import squared_norms
from profiles import BATCH_SIZES, by_day
from trial_helpers import make_trials, state, unchanged, uniform

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.runner import BlockRunner, replay
from optimum_neuronal.blocks.statistics import Hessian, activation
from optimum_neuronal.pruning.final_pass import FinalPruning
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.plan import mask_rows


# Those that prune by their score alone.
SCORING = [name for name in SALIENCIES.names() if not SALIENCIES.get(name).updates_weights]

SPARSEGPT = {"saliency": "sparsegpt", "topup": "uniform"}
METHODS = {
    "sparsegpt, search": {"saliency": "sparsegpt", "topup": "search", "topup_args": {"budget": 20}},
    "sparsegpt": SPARSEGPT,
    "alps": {"saliency": "alps", "saliency_args": {"iterations": 9}, "topup": "uniform"},
    "wanda, dsnot": {"topup": "dsnot"},
    "wanda, search": {"topup": "search", "topup_args": {"budget": 20}},
}


def prune(model, ids, fields, work_dir=None):
    memory = memory_of(fields)
    config = NeuronALConfig(0.6, num_samples=12, num_alignment_samples=4, **{"saliency": "wanda", **fields})
    pruner = NeuronALPruner(config)
    pruner.prune(model, ids, work_dir, **memory)
    return pruner


@pytest.mark.usefixtures("batched")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", by_day(["llama", "mixtral", "gpt2"], "mixtral"))
def test_neither_batches_nor_a_disk_change_a_bit(family, method, ids, tmp_path):
    first, *others = [make_model(family) for _ in BATCH_SIZES]
    expected = prune(first, ids, {**METHODS[method], "batch_size": BATCH_SIZES[0]}).report
    assert expected.achieved_sparsity == pytest.approx(0.6, abs=2e-3)
    for model, batch_size in zip(others, BATCH_SIZES[1:]):
        prune(model, ids, {**METHODS[method], "batch_size": batch_size})
        assert unchanged(model, state(first))
    on_disk = make_model_on_disk(tmp_path, family)
    assert prune(on_disk, ids, {**METHODS[method], "max_hidden_bytes": 0}).report.projections == expected.projections
    assert torch.equal(on_disk(ids).logits, first(ids).logits)


def test_only_blocks_with_pruned_projections_are_measured(llama, ids, monkeypatch):
    seen, inputs_of = [], BlockRunner.inputs_of

    def spied(self, block, *args):
        seen.append(block.name)
        return inputs_of(self, block, *args)

    monkeypatch.setattr(BlockRunner, "inputs_of", spied)
    prune(llama, ids, {**SPARSEGPT, "ignore": [r"layers\.1\."]})
    assert seen == ["model.layers.0", "model.layers.2"]


def test_a_failed_prune_changes_nothing(llama, ids, monkeypatch):
    before = state(llama)
    failed = (torch.zeros(()), torch.ones((), dtype=torch.int32))
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *args, **kwargs: failed)  # every Hessian fails
    with pytest.raises(ValueError, match="Hessian of model.layers.0.self_attn.q_proj cannot be inverted"):
        prune(llama, ids, SPARSEGPT)
    assert unchanged(llama, before)
    assert getattr(llama.config, "sparsity_config", None) is None


def test_starved_experts_of_sparsegpt_are_pruned_by_magnitude(ids):
    """An expert without tokens has no Hessian worth the name: a flat one takes its place."""
    model, dense = make_model("mixtral"), make_model("mixtral")
    fields = {**SPARSEGPT, "min_expert_tokens": 10_000}
    pruner = prune(model, ids, fields)
    assert len(pruner.report.starved_experts) == sum("experts" in name for name in pruner.report.projections)
    name = pruner.report.starved_experts[0]
    owner = name.rpartition(".experts.")[0] + ".experts"
    sparse, original = (m.get_submodule(owner).gate_up_proj[0] for m in (model, dense))
    kept = sparse != 0
    torch.testing.assert_close(sparse[kept], original[kept])
    assert original.abs()[kept].min() >= 0.9 * original.abs()[~kept].max()


def test_updated_weights_follow_the_pruned_stream(any_model, ids):
    """Block by block, by hand: every block sees the updated weights before it."""
    with inference(any_model):
        trials = make_trials(any_model, ids, "sparsegpt")
        plan, before = uniform(trials, 0.6), state(any_model)
        found = FinalPruning(trials, plan).find()[0]
        assert unchanged(any_model, before)
        for block in trials.decoder.blocks:
            inputs = BlockRunner(trials.decoder, 12).capture(ids)
            hidden = inputs.hidden
            for earlier, calls in zip(trials.decoder.blocks, inputs.calls):
                hidden, norms = replay(earlier, hidden, calls, Hessian)
                if earlier is block:
                    break
            for projection in block.pruned:
                expected = trials.saliency.prune(projection.weight, norms[projection.name].hessian, 0.6)
                different = ((expected == 0) != (found[projection.name].unpack() == 0)).sum().item()
                assert different <= 0.02 * expected.numel() + 2, "equal but for rounding, which updates amplify"
            for projection in block.pruned:
                found[projection.name].apply_to(projection.weight)


# Every family and every saliency; at night each with each.
@pytest.mark.parametrize(
    ("family", "saliency"),
    by_day(product(FEW, SCORING), *product(FEW, ["wanda"]), *product(["gpt2", "mixtral"], SCORING)),
)
def test_final_masks_follow_the_pruned_stream(family, ids, saliency):
    """Every block's masks come from the activations behind the pruned blocks before it: block by block, by hand."""
    model = make_model(family)
    with inference(model):
        trials = make_trials(model, ids, saliency)
        plan = uniform(trials, 0.7)
        before = state(model)
        masks = {name: mask.unpack() for name, mask in FinalPruning(trials, plan).find()[0].items()}
        assert unchanged(model, before)
        for block in trials.decoder.blocks:
            norms = squared_norms(model, ids, block.projections)
            for projection in block.pruned:
                score = trials.saliency.score(projection.weight, activation(norms[projection.name]))
                expected = mask_rows(score, plan.row_counts(projection.name, projection.shape))
                different = (expected != masks[projection.name]).sum().item()
                assert different <= 2, "equal but for rounding, which differs between one forward and a replay"
            for projection in block.pruned:
                projection.weight.masked_fill_(~masks[projection.name], 0)
