import pytest
import torch
from conftest import FEW, make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import context
from optimum_neuronal.pruning.dry_run import _one_block, plan_prune
from optimum_neuronal.pruning.refit import Refit
from optimum_neuronal.topup import TOPUPS

from .conftest import SMALL, config_of, saved


def test_without_calibration_no_block_runs(tmp_path, llama):
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(topup="uniform", saliency="magnitude"))
    assert plan.block_forwards == 0 and plan.hidden_bytes == 0
    assert all(text in str(plan) for text in ("size in float32", "a rough estimate", "without evaluation"))


@pytest.mark.parametrize("family", FEW)
def test_sizes_are_those_of_the_model_and_of_its_prune(family, tmp_path):
    model, config = make_model(family), config_of(topup="uniform", saliency="magnitude")
    directory, _ = saved(tmp_path, model)
    plan = plan_prune(directory, config)
    assert 0 < plan.bytes_saved < model.get_memory_footprint()
    pruner = NeuronALPruner(config)
    pruner.prune(model)
    assert f"{len(pruner.report.projections)} projections in {len(pruner.report.blocks)} blocks" in str(plan)
    assert plan.size.bits_per_weight == pytest.approx(pruner.report.bits_per_weight, rel=0.02)


METHODS = [("wanda", name) for name in TOPUPS.names()] + [("alps", name) for name in ("uniform", "search", "neuronal")]


@pytest.mark.parametrize("saliency, topup", METHODS)
def test_block_forwards_are_roughly_those_of_the_prune(saliency, topup, tmp_path, ids):
    config = NeuronALConfig(0.5, saliency, topup=topup, num_samples=8, num_alignment_samples=2, seq_length=16)
    model = make_model("llama")
    plan = plan_prune(saved(tmp_path, model)[0], config)
    assert plan.seconds > 0
    pruner = NeuronALPruner(config)
    pruner.prune(model, ids[:8])
    assert plan.block_forwards == pytest.approx(pruner.report.block_forwards, rel=0.4)


def test_the_first_block_is_left_out(tmp_path):
    """In this family, the first two blocks differ."""
    directory, _ = saved(tmp_path, make_model("gemma4_text"))
    assert plan_prune(directory, config_of(ignore=[r"layers\.0\."])).seconds > 0


def test_the_block_that_is_timed_has_experts_if_any_has():
    """The first block of this family is dense."""
    assert _one_block(find_decoder(make_model("glm4_moe")), torch.device("cpu")).blocks[0].experts


def test_experts_that_share_a_rate_count_once():
    decoder = find_decoder(make_model("qwen3_moe"))
    methods = NeuronALConfig(bits_per_weight=6).methods
    units = len(decoder.blocks) * (4 + 2)  # projections of attention, and two parameters of experts
    assert methods.topup.forwards(decoder, methods.saliency, 4, 8) == 4 * len(decoder.blocks) * (1 + units // 2)


def test_candidates_that_are_solved_are_counted():
    alps = config_of(saliency="alps", topup="neuronal").methods
    assert alps.topup.solves(alps.saliency) == 0, "masks from Wanda's score"
    search = config_of(saliency="alps", topup="search").methods
    assert search.topup.solves(search.saliency) == 3, "those of the first stage"


def test_bits(tmp_path, llama):
    fields = {name: value for name, value in SMALL.items() if name != "topup"}
    plan = plan_prune(saved(tmp_path, llama)[0], NeuronALConfig(bits_per_weight=8, **fields))
    assert plan.size.bits_per_weight <= 8 and "rates by divergence" in str(plan)


def test_a_refit_is_timed_in_its_dtype_and_without_one_none_is(tmp_path, llama, monkeypatch):
    timed, fit = [], Refit.fit

    def noted(refit, *args, **kwargs):
        timed.append((refit.dtype, refit.epochs))
        return fit(refit, *args, **kwargs)

    monkeypatch.setattr(Refit, "fit", noted)
    monkeypatch.setattr(context, "WIDE", 32)
    monkeypatch.setattr(context, "multiplies_bfloat16", lambda: True)
    directory = saved(tmp_path, llama)[0]
    fields = {"topup": "uniform", "saliency": "sparsegpt", "num_samples": 16}
    plain = plan_prune(directory, config_of(**fields))
    assert not timed
    fitted = plan_prune(directory, config_of(**fields, refit_epochs=40))
    assert timed == [(torch.bfloat16, 1)] and "sparsegpt + uniform, refit of 40 epochs" in str(fitted)
    assert fitted.seconds > plain.seconds and fitted.block_forwards > 40 * plain.block_forwards
