import gc
import json
import sys

import pytest
import torch
import transformers
from conftest import FEW, make_model
from families import FAMILIES
from profiles import at_night

from optimum.commands import optimum_cli
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.checkpoint.save_pretrained import save_pretrained
from optimum_neuronal.engine import progress as progress_module
from optimum_neuronal.engine import runner as engine_module
from optimum_neuronal.formats.packed import PackedMask
from optimum_neuronal.inference.sparsify import sparsify
from optimum_neuronal.pruning import prune as prune_module
from optimum_neuronal.pruning.dry_run import plan_prune
from optimum_neuronal.trials.sweep import Sweep

from .conftest import RATE, SMALL, config_of, saved


pytestmark = pytest.mark.usefixtures("known_rate")


@pytest.fixture
def no_candidate_is_abandoned(monkeypatch):
    """What a plan foretells: every candidate runs to the end."""
    measure = Sweep.alignment_errors

    def unbounded(self, *args, bound=None, **kwargs):
        return measure(self, *args, **kwargs)

    monkeypatch.setattr(Sweep, "alignment_errors", unbounded)


def assert_forwards(plan, report):
    """The plan's block forwards are those that the prune counted."""
    assert plan.block_forwards == report.block_forwards


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("reference", ["sparse-stream", "dense"])
@pytest.mark.parametrize("steps", ["block", "row", "both"])
def test_forwards_of_neuronal(family, steps, reference, tmp_path, ids, no_candidate_is_abandoned):
    model, config = make_model(family), config_of(steps=steps, reference=reference)
    plan = plan_prune(saved(tmp_path, model)[0], config)
    pruner = NeuronALPruner(config)
    pruner.prune(model, dataset=ids[:6])
    assert_forwards(plan, pruner.report)
    assert plan.zeros / plan.pruned_weights == pytest.approx(pruner.report.achieved_sparsity, abs=2e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_lambdas": (0.1,), "row_lambdas": (0.0,)},
        {"block_lambdas": (0.1, 0.2), "row_lambdas": (0.1, 0.2)},
        {"saliency": "magnitude"},
        {"topup": "uniform", "saliency": "wanda"},
        {"topup": "uniform", "saliency": "multiflow"},
        {"topup": "uniform", "saliency": "magnitude"},
        {"topup": "owl"},
        {"topup": "owl", "saliency": "magnitude"},
        {"topup": "dlp"},
        {"topup": "alpha_pruning"},
        {"topup": "alpha_pruning", "saliency": "magnitude"},
        {"topup": "dsnot"},
        {"topup": "dsnot", "saliency": "magnitude"},
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [1, 2])
def test_forwards_of_other_methods(fields, layers, tmp_path, ids, no_candidate_is_abandoned):
    model, config = make_model("llama", num_hidden_layers=layers), config_of(**fields)
    plan = plan_prune(saved(tmp_path, model)[0], config)
    pruner = NeuronALPruner(config)
    pruner.prune(model, dataset=ids[:6])
    assert_forwards(plan, pruner.report)


ALPS = {"topup": "uniform", "saliency": "alps", "saliency_args": {"iterations": 2}}
SPARSEGPT = {"topup": "uniform", "saliency": "sparsegpt"}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(
    "fields, more",
    [
        ({**ALPS, "reconstruct": "block"}, 0),
        (SPARSEGPT, 0),
        ({**ALPS, "topup": "owl", "reconstruct": "block"}, 0),
        ({**SPARSEGPT, "refit_epochs": 2, "num_samples": 16}, 0),
        (ALPS, 3 * 2),
        ({**ALPS, "refit_epochs": 1, "num_samples": 16}, 3 * 8),
    ],
    ids=str,
)
def test_forwards_of_methods_that_update_weights(fields, more, family, tmp_path):
    """Toward the dense model, one batch of each of the three blocks more, which tells the order of projections; and experts'
    two stages take whole runs instead of halves."""
    model, config = make_model(family), config_of(**fields)
    plan = plan_prune(saved(tmp_path, model)[0], config, batch_size=2)
    pruner = NeuronALPruner(config)
    pruner.prune(model, dataset=torch.randint(0, 64, (config.num_samples, 16)), batch_size=2)
    more += 3 * config.num_samples if more and family == "mixtral" else 0
    assert pruner.report.block_forwards == plan.block_forwards + more
    assert bool(config.refit_epochs) == ("refit" in str(plan)) == (plan.sweeps[-1].label == "Refit")


def test_forwards_of_a_refit_that_rounds(llama, tmp_path):
    """One batch of each of the three blocks more tells the order of projections."""
    config = config_of(**SPARSEGPT, refit_epochs=2, num_samples=16, value_bits=4)
    plan = plan_prune(saved(tmp_path, llama)[0], config)
    pruner = NeuronALPruner(config)
    pruner.prune(llama, dataset=torch.randint(0, 64, (16, 16)))
    assert pruner.report.block_forwards == plan.block_forwards + 3 * 8


def test_forwards_of_a_search_with_levels(tmp_path, ids, llama):
    """What rounds do not use of the budget is saved."""
    config = config_of(**{**ALPS, "topup": "search", "topup_args": {"budget": 20}, "num_samples": 12})
    plan = plan_prune(saved(tmp_path, llama)[0], config)
    pruner = NeuronALPruner(config)
    pruner.prune(llama, dataset=ids)
    labels = list(dict.fromkeys(sweep.label for sweep in plan.sweeps))
    assert labels == ["Check", "Levels", "Dense activations", "Search", "Pruning"]
    assert plan.sweeps[1].block_forwards == 3 * (12 - 2), "but for the sequences that candidates are measured on"
    assert plan.block_forwards / 2 < pruner.report.block_forwards <= plan.block_forwards + 3 * 12


def test_candidates_abandoned_early_only_save_forwards(tmp_path, ids, llama):
    config = config_of(block_lambdas=(0.01, 0.05, 0.1, 0.2, 0.25))
    plan = plan_prune(saved(tmp_path, llama)[0], config)
    pruner = NeuronALPruner(config)
    pruner.prune(llama, dataset=ids[:6])
    assert plan.block_forwards / 3 < pruner.report.block_forwards <= plan.block_forwards


def test_sweeps_have_the_names_and_plans_of_the_real_ones(tmp_path, ids, llama, monkeypatch):
    config = config_of(reference="dense")
    plan = plan_prune(saved(tmp_path, llama)[0], config)
    shown, tqdm = [], progress_module.logging.tqdm

    def noted(*args, desc=None, unit=None, **kwargs):
        if unit == "block" and desc:
            shown.append(desc)
        return tqdm(*args, **kwargs)

    monkeypatch.setattr(progress_module.logging, "tqdm", noted)
    NeuronALPruner(config).prune(llama, dataset=ids[:6])
    check, *others = [sweep.label for sweep in plan.sweeps]
    assert check == "Check" and sorted(others) == sorted(shown)  # the dense pass runs inside the first step
    assert [sweep.plans for sweep in plan.sweeps if sweep.label.endswith("step")] == [1, 2, 2]


def test_nothing_runs_without_calibration(tmp_path, llama):
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(topup="uniform", saliency="magnitude"))
    assert (plan.sweeps, plan.block_forwards, plan.seconds, plan.hidden_bytes, plan.trial_bytes) == ((), 0, 0, 0, 0)
    assert "no calibration data is needed" in str(plan) and plan.zeros > 0


@pytest.mark.parametrize("family", FEW)
def test_zeros_of_a_uniform_prune_are_exact(family, tmp_path):
    model, config = make_model(family), config_of(topup="uniform", saliency="magnitude")
    plan = plan_prune(saved(tmp_path, model)[0], config)
    pruner = NeuronALPruner(config)
    pruner.prune(model)
    assert plan.zeros / plan.pruned_weights == pruner.report.achieved_sparsity
    assert plan.projections == len(pruner.report.projections) and plan.blocks == len(pruner.report.blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_every_family(family, tmp_path):
    model = make_model(family)
    directory, file_bytes = saved(tmp_path, model)
    plan = plan_prune(directory, config_of(steps="block"))
    assert plan.saved_bytes == file_bytes
    assert plan.model_bytes == model.get_memory_footprint()
    assert plan.weights == sum(weight.numel() for weight in model.parameters())
    blocks = plan.model_bytes - plan.outside_bytes
    assert 0 < plan.block_bytes <= blocks <= plan.block_bytes * plan.blocks
    assert plan.streamed_bytes <= plan.memory_bytes
    assert plan.dtype == "float32" and plan.hidden_bytes % (plan.seq_length * 4) == 0


@pytest.mark.parametrize("family", FEW)
def test_packed_bytes_are_those_of_a_prune(family, tmp_path):
    model = make_model(family)
    config = config_of(topup="uniform", saliency="magnitude")
    plan = plan_prune(saved(tmp_path, model)[0], config)
    NeuronALPruner(config).prune(model)
    save_pretrained(model, tmp_path / "packed", format="packed")
    stored = sum(PackedFile.open(path).nbytes for path in (tmp_path / "packed").glob("*.safetensors"))
    assert plan.packed_saved_bytes == pytest.approx(stored, rel=0.01) and stored < plan.saved_bytes
    sparsify(model)
    if family != "llama4_text":  # whose experts stay dense
        assert plan.packed_model_bytes == pytest.approx(model.get_memory_footprint(), rel=0.01)
    assert plan.packed_model_bytes < plan.model_bytes and "packed" in str(plan)
    assert plan.to_dict()["packed_saved_bytes"] == plan.packed_saved_bytes


@pytest.mark.parametrize("bits", [8, 3])
def test_packed_bytes_of_values_of_few_bits(bits, tmp_path):
    model = make_model("llama", hidden_size=256, intermediate_size=512)
    config = config_of(topup="uniform", saliency="magnitude", value_bits=bits)
    plan = plan_prune(saved(tmp_path, model)[0], config)
    NeuronALPruner(config).prune(model)
    save_pretrained(model, tmp_path / "packed", format="packed")
    stored = sum(PackedFile.open(path).nbytes for path in (tmp_path / "packed").glob("*.safetensors"))
    assert plan.packed_saved_bytes == pytest.approx(stored, rel=0.01)
    sparsify(model, value_bits=bits)
    assert plan.packed_model_bytes == pytest.approx(model.get_memory_footprint(), rel=0.01)


def test_tied_weights_count_once(tmp_path):
    model = make_model("llama", tie_word_embeddings=True)
    directory, file_bytes = saved(tmp_path, model)
    plan = plan_prune(directory, config_of())
    assert plan.saved_bytes == file_bytes and plan.weights == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_trial_weights_and_masks(family, tmp_path, ids, monkeypatch):
    """What a prune really makes anew: the weights of a trial, and the masks at the end."""
    model, config = make_model(family), config_of(ignore=["o_proj"])
    plan = plan_prune(saved(tmp_path, model)[0], config)
    made, masks, replay, apply = [], [], engine_module.replay, prune_module.apply_changes
    original = {id(p): p.data_ptr() for p in model.parameters()}

    def noted(block, *args, **kwargs):
        changed = [p for p in block.module.parameters() if p.data_ptr() != original[id(p)]]
        made.append(sum(p.numel() * p.element_size() for p in changed))
        return replay(block, *args, **kwargs)

    def kept(decoder, final, *args, **kwargs):
        masks.extend(final.values())
        return apply(decoder, final, *args, **kwargs)

    monkeypatch.setattr(engine_module, "replay", noted)
    monkeypatch.setattr(prune_module, "apply_changes", kept)
    NeuronALPruner(config).prune(model, dataset=ids[:6])
    assert plan.trial_bytes == max(made) > 0
    assert plan.mask_bytes == sum(mask.bits.numel() for mask in masks) > 0
    assert all(isinstance(mask, PackedMask) for mask in masks)


@pytest.mark.parametrize(
    "fields, layers",
    [
        pytest.param({"num_samples": 2}, 3, marks=at_night),
        ({"num_samples": 2, "steps": "row", "row_lambdas": (0.0,)}, 3),
        pytest.param({"num_samples": 2, "steps": "row", "row_lambdas": (0.0,)}, 1, marks=at_night),
        ({"num_samples": 2, "steps": "block", "reference": "dense"}, 2),
        ({"num_samples": 12}, 3),
        ({"num_samples": 12, "topup": "uniform"}, 2),
        ({"num_samples": 12, "topup": "uniform"}, 1),
        ({"num_samples": 12, **ALPS}, 3),
        ({"num_samples": 12, **ALPS, "reconstruct": "block"}, 3),
    ],
    ids=str,
)
def test_hidden_states(fields, layers, tmp_path, ids, monkeypatch, no_candidate_is_abandoned):
    """At the end of each run of a block, the sequences whose hidden states exist are counted."""
    model, config = make_model("llama", num_hidden_layers=layers), config_of(**fields)
    plan = plan_prune(saved(tmp_path, model)[0], config)
    alive, replay = [], engine_module.replay

    def hidden_states():
        tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        return {id(tensor): tensor for tensor in tensors if tensor.shape[1:] == (16, 32)}

    others = hidden_states()  # of other tests; held, so that no other tensor has their numbers

    def counted(*args, **kwargs):
        result = replay(*args, **kwargs)
        own = (tensor for number, tensor in hidden_states().items() if number not in others)
        alive.append(sum(tensor.numel() * tensor.element_size() for tensor in own))
        return result

    monkeypatch.setattr(engine_module, "replay", counted)
    NeuronALPruner(config).prune(model, dataset=ids[: config.num_samples])
    assert max(alive) == plan.hidden_bytes


@pytest.mark.parametrize("asked, got", [("auto", "bfloat16"), ("float16", "float16"), (torch.float32, "float32")])
def test_dtype(asked, got, tmp_path, llama):
    directory, _ = saved(tmp_path, llama.to(torch.bfloat16))
    plan = plan_prune(directory, config_of(), dtype=asked)
    expected = llama.to(getattr(torch, got))
    assert plan.dtype == got and plan.saved_bytes == sum(p.numel() * p.element_size() for p in expected.parameters())


def test_no_weight_is_made(tmp_path, llama):
    """A model of many terabytes is planned like any other."""
    directory, _ = saved(tmp_path, llama)
    file = directory / "config.json"
    large = json.loads(file.read_text()) | {"hidden_size": 2**17, "intermediate_size": 2**19, "head_dim": 2**15}
    file.write_text(json.dumps(large | {"max_position_embeddings": 4096}))
    plan = plan_prune(directory, NeuronALConfig(0.7, saliency="wanda"))
    assert plan.saved_bytes > 1e12 and plan.seq_length == 2048 and "TB" in str(plan)


def test_the_table_and_the_dict_tell_the_same(tmp_path, llama):
    plan = plan_prune(saved(tmp_path, llama)[0], config_of())
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["block_forwards"] == plan.block_forwards and values["seconds"] == plan.operations / RATE
    assert sum(sweep["operations"] for sweep in values["sweeps"]) == values["operations"]
    text = str(plan)
    for part in ("21 projections in 3 blocks", f"{plan.block_forwards:,} block forwards", "row step", "about"):
        assert part in text
    assert max(map(len, text.split("\n"))) < 120


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"ignore": ["qqq"]}, "match no projection"),
        ({"seq_length": 1000}, "admits 1 to 64 tokens"),
        ({"pattern": "3:10", "topup": "uniform"}, "32 input features, not a multiple of 10"),
    ],
)
def test_what_a_prune_refuses_is_refused(fields, message, tmp_path, llama):
    with pytest.raises(ValueError, match=message):
        plan_prune(saved(tmp_path, llama)[0], config_of(**fields))


def test_sparse_and_unknown_dtypes_are_refused(tmp_path, llama):
    llama.config.sparsity_config = dict(
        version=1, quant_method="neuronal", format="dense", sparsity=0.5, achieved_sparsity=0.5
    )
    directory, _ = saved(tmp_path, llama)
    with pytest.raises(ValueError, match="sparse already"):
        plan_prune(directory, config_of())
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        transformers.AutoConfig.for_model("llama", **FAMILIES["llama"].config).save_pretrained(tmp_path / "other")
        plan_prune(tmp_path / "other", config_of(), dtype="int8")


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "neuronal", "prune", *map(str, arguments)])
        optimum_cli.main()
        return capsys.readouterr().out

    return call


def test_cli_prints_the_plan_and_writes_nothing(run, tmp_path, llama, monkeypatch):
    directory, _ = saved(tmp_path, llama)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words")
    before = sorted(tmp_path.rglob("*"))
    flags = ("--model", directory, "--sparsity", 0.7, "--dry-run", "--seq-length", 16, "--dataset", "text.txt")
    printed = run(*flags)
    assert printed.strip() == str(plan_prune(directory, NeuronALConfig(0.7, seq_length=16))).strip()
    assert run(*flags, "--output", tmp_path / "sparse", "--stream", "--dtype", "bfloat16") != printed
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--dry-run", "--model", "./nowhere"), "prune: error: .*nowhere"),
        (("--dry-run", "--targets", "qqq"), "prune: error: .*match no projection"),
        ((), "prune: error: --output is missing"),
    ],
)
def test_cli_errors_are_one_line(run, tmp_path, llama, flags, message):
    directory, _ = saved(tmp_path, llama)
    with pytest.raises(SystemExit, match=message) as stop:
        run("--model", directory, "--sparsity", 0.7, *flags)
    assert "\n" not in str(stop.value.code)


def test_a_budget_of_bits(tmp_path, ids):
    """Whatever it is spent on, as many bytes and passes; of sparsities one is told of, and which there are."""
    model, own = make_model("llama"), {"topup": "uniform", "saliency": "wanda", "num_samples": 8}
    config = NeuronALConfig(bits_per_weight=3.0, **{**SMALL, **own})
    directory, _ = saved(tmp_path, model)
    plan = plan_prune(directory, config)
    assert [pair.value_bits for pair in plan.pairs] == [2, 3, 4, 8] and plan.config["value_bits"] == 3
    assert "2 at " in str(plan) and "what loses least is chosen" in str(plan)
    for pair in plan.pairs:
        settled = plan_prune(directory, pair.of(config))
        assert settled.packed_saved_bytes == pytest.approx(plan.packed_saved_bytes, rel=1e-3) and not settled.pairs
    pruner = NeuronALPruner(config)
    pruner.prune(model, dataset=ids[:8])
    assert_forwards(plan, pruner.report)
