import json
import sys

import pytest
import torch
import transformers
from conftest import FEW, make_model
from families import FAMILIES
from profiles import by_day

from optimum.commands import optimum_cli
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.checkpoint.save_pretrained import save_pretrained
from optimum_neuronal.packed.sparsify import sparsify
from optimum_neuronal.pruning import dry_run
from optimum_neuronal.pruning.dry_run import plan_prune
from optimum_neuronal.rotation.learning import Rotation
from optimum_neuronal.rotation.sensitivity import BACKWARD

from .conftest import SMALL, config_of, saved


def test_without_calibration_weights_alone_are_measured(tmp_path, llama):
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(topup="uniform", saliency="magnitude"))
    assert [step.label for step in plan.steps] == ["Pruning"] and plan.block_forwards == 0
    assert "no calibration data is needed" in str(plan) and plan.zeros > 0


@pytest.mark.parametrize("family", FEW)
def test_zeros_of_a_uniform_prune_are_exact(family, tmp_path):
    model, config = make_model(family), config_of(topup="uniform", saliency="magnitude")
    plan = plan_prune(saved(tmp_path, model)[0], config)
    pruner = NeuronALPruner(config)
    pruner.prune(model)
    assert plan.zeros / plan.pruned_weights == pruner.report.achieved_sparsity
    assert plan.projections == len(pruner.report.projections) and plan.blocks == len(pruner.report.blocks)


@pytest.fixture
def nothing_is_measured(monkeypatch):
    monkeypatch.setattr(dry_run, "rehearse", lambda *args: [])


@pytest.mark.usefixtures("nothing_is_measured")
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
    assert plan.dtype == "float32" and plan.alignment_bytes % (plan.seq_length * 4) == 0


@pytest.mark.parametrize("family", by_day(FAMILIES, *FEW))
def test_every_family_is_rehearsed(family, tmp_path):
    model = make_model(family)
    plan = plan_prune(saved(tmp_path, model)[0], config_of(steps="block"))
    assert all(step.seconds > 0 and step.moment_bytes > 0 for step in plan.steps)
    assert plan.memory_bytes > plan.model_bytes


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


FEW_SEQUENCES = {name: value for name, value in SMALL.items() if name != "topup"}


@pytest.mark.parametrize("embedding_bits", [None, 8])
def test_packed_bytes_of_few_bits(embedding_bits, tmp_path, ids):
    model = make_model("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = NeuronALConfig(bits_per_weight=3.0, topup="uniform", embedding_bits=embedding_bits, **FEW_SEQUENCES)
    plan = plan_prune(saved(tmp_path, model)[0], config)
    assert plan.zeros == 0 and 2.9 < plan.bits_per_weight <= 3 and plan.config["sparsity"] is None
    assert "quantised, uniform rates" in str(plan) and f"{plan.bits_per_weight:.3f} bits a weight" in str(plan)
    pruner = NeuronALPruner(config)
    pruner.prune(model, ids[:6])
    assert pruner.report.bits_per_weight == plan.bits_per_weight
    assert plan.packed_model_bytes == pytest.approx(model.get_memory_footprint(), rel=0.01)
    save_pretrained(model, tmp_path / "packed", format="packed")
    stored = sum(PackedFile.open(path).nbytes for path in (tmp_path / "packed").glob("*.safetensors"))
    assert plan.packed_saved_bytes == pytest.approx(stored, rel=0.01)


def test_tied_weights_count_once(tmp_path):
    model = make_model("llama", tie_word_embeddings=True)
    directory, file_bytes = saved(tmp_path, model)
    plan = plan_prune(directory, config_of())
    assert plan.saved_bytes == file_bytes and plan.weights == sum(weight.numel() for weight in model.parameters())


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


def test_the_table_and_the_dict_hold_the_same(tmp_path, llama):
    plan = plan_prune(saved(tmp_path, llama)[0], config_of())
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["block_forwards"] == plan.block_forwards and values["seconds"] == plan.seconds > 0
    assert sum(step["seconds"] for step in values["steps"]) == values["seconds"]
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
    monkeypatch.setattr(dry_run, "rehearse", lambda *args: [])  # whose seconds differ from run to run
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


@pytest.mark.parametrize("tied", [False, True])
def test_a_rotation_is_measured_with_its_copies_and_the_untied_head(tied, tmp_path):
    model = make_model("llama", tie_word_embeddings=tied)
    directory, file_bytes = saved(tmp_path, model)
    plan = plan_prune(directory, config_of(topup="uniform", rotate=True))
    assert [step.label for step in plan.steps] == ["Check", "Rotation", "Pruning"]
    own, head = plan.steps[1], model.lm_head.weight.nbytes
    assert own.seconds > 0 and own.kept_bytes > 0
    samples, gradients = plan.config["num_samples"], min(16, plan.config["num_samples"])
    assert own.block_forwards == plan.blocks * (samples + (1 + BACKWARD) * gradients)
    assert plan.saved_bytes == file_bytes + tied * head
    assert plan.model_bytes == model.get_memory_footprint() + tied * head
    assert plan.originals_bytes == sum(weight.nbytes for weight in model.parameters()), "all of a Llama changes"
    assert "rotated, " in str(plan) and "--stream" in str(plan) and plan.streamed_bytes < plan.memory_bytes


def test_norms_with_biases_are_not_read(tmp_path):
    directory, _ = saved(tmp_path, make_model("gpt2"))
    plan = plan_prune(directory, config_of(topup="uniform", saliency="magnitude", rotate=True))
    assert plan.originals_bytes > 0 and "rotated" in str(plan)


def test_rows_of_a_rotation_are_counted(tmp_path):
    """Of weights on disk always; of weights in memory if only some are drawn, as copies then."""
    directory, _ = saved(tmp_path, make_model("llama"))
    for arguments, share in (({}, 1), ({"rows": 0.5}, 0.5), ({"rows": 1}, 1)):
        plan = plan_prune(directory, config_of(topup="uniform", rotate=True, rotate_args=arguments))
        values = 2 * 32 * 32  # of the heads, and what reads them: whole
        assert plan.drawn_bytes == 3 * 4 * (values + share * (2 * 32 * 32 + 3 * 32 * 48))
        assert plan.working_bytes == plan._working_bytes(plan.drawn_bytes if share < 1 else 0)
    assert [Rotation().share_of_rows(size) for size in (64, 1024, 2048, 4096)] == [1, 1, 0.5, 0.25]
    assert Rotation(rows=0.1).share_of_rows(64) == 0.1
