import json
import math
import shutil

import pytest
import torch
from accelerate import disk_offload
from conftest import make_model, make_tokenizer
from profiles import by_day
from trial_helpers import same_state, state

from optimum_neuronal import NeuronALConfig, NeuronALPruner, PruningReport, compare, evaluate_perplexity
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.checkpoint.inspecting import inspect_checkpoint
from optimum_neuronal.comparing import compare as comparing
from optimum_neuronal.comparing import study
from optimum_neuronal.comparing.compare import CombinationRunner
from optimum_neuronal.comparing.experiments import experiment
from optimum_neuronal.evaluation.tasks import TaskSet
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.load_model import load_model
from optimum_neuronal.saliency import SALIENCIES

from .conftest import SMALL


TUNED = "neuronal:block_lambdas=[0.05,0.1],row_lambdas=[0.0,0.1]"
METHODS = {"saliencies": ["wanda", "magnitude"], "topups": ["uniform", TUNED]}
DENSE_STREAM = ["owl", "neuronal:steps=block,block_lambdas=[0.1],reference=dense"]
ONE = {"saliencies": ["magnitude"], "topups": ["uniform"]}


def assert_alone(result, family, ids):
    """A result is what pruning in this way alone gives."""
    pruner, model = NeuronALPruner(NeuronALConfig.from_dict({**result.config, **SMALL})), make_model(family)
    pruner.prune(model, ids[:6])
    report = pruner.report
    assert result.error is None and result.achieved_sparsity == report.achieved_sparsity
    assert result.perplexity["test"] == pytest.approx(evaluate_perplexity(model, None, ids[6:]), rel=1e-5)
    assert (result.block_lambda, result.row_lambda) == (report.block_lambda, report.row_lambda)
    names = [block.name for block in find_decoder(model).blocks]
    assert result.block_sparsity == [report.blocks.get(name) for name in names]
    assert result.projection_sparsity == {name: one["sparsity"] for name, one in report.projections.items()}


@pytest.mark.usefixtures("quick_alps")
@pytest.mark.parametrize("family", by_day(["llama", "mixtral", "gpt2"], "llama"))
@pytest.mark.parametrize("saliency", SALIENCIES.names())
def test_every_row_is_what_pruning_alone_gives(family, saliency, ids, others):
    """The model's weights are restored."""
    model = make_model(family)
    before = state(model)
    comparison = compare(model, saliencies=[saliency], topups=["uniform", TUNED], **others)
    dense = evaluate_perplexity(make_model(family), None, ids[6:])
    assert comparison.dense.perplexity["test"] == pytest.approx(dense, rel=1e-5)
    assert same_state(model, before)
    assert getattr(model.config, "sparsity_config", None) is None
    assert [result.config["topup"] for result in comparison.results] == ["uniform", "neuronal"]
    for result in comparison.results:
        assert_alone(result, family, ids)


def test_given_methods_of_the_papers_experiment_are_the_presets(tokenizer, others, tmp_path):
    """`compare --preset paper --topup uniform neuronal` beside the preset: to the last digit."""
    text = tmp_path / "text.csv"
    text.write_text("text\n" + "\n".join(" ".join(f"w{(i * j) % 60}" for i in range(40 + j)) for j in range(20)))
    given = {**others, "saliencies": ["wanda"], "topups": ["uniform", "neuronal"], "dataset": str(text), "tasks": []}
    arguments = experiment("paper", **given, presets=["paper"], seq_length=16)
    uniform, neuronal, preset = compare(make_model("llama"), tokenizer, **arguments).results
    assert uniform.topup == "uniform, authors" and neuronal.topup == "neuronal, authors, block and row steps"
    assert preset.topup == f"paper (wanda + {neuronal.topup})"
    assert preset.config == {**neuronal.config, "add_bos": False}
    for name in ("perplexity", "decisions", "block_sparsity", "achieved_sparsity", "row_lambda", "block_lambda"):
        assert getattr(neuronal, name) == getattr(preset, name)
    assert neuronal.row_lambda is not None and preset.config["sampling"] == "authors"


def test_it_resumes_where_it_was_interrupted(llama, others, tmp_path, monkeypatch):
    started, run = [], CombinationRunner.run

    def interrupted(self, combination, kept):
        started.append(combination)
        if len(started) == 3:
            raise KeyboardInterrupt
        return run(self, combination, kept)

    monkeypatch.setattr(CombinationRunner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(llama, **METHODS, **others, output=tmp_path)
    assert len(json.loads((tmp_path / "comparison.json").read_text())["results"]) == 2
    comparison = compare(llama, **METHODS, **others, output=tmp_path)
    assert len(started) == 3 + 2 and len(comparison.results) == 4, "two were finished"
    compare(llama, **METHODS, **others, output=tmp_path)
    assert len(started) == 5
    compare(llama, **METHODS, **others, output=tmp_path, overwrite=True)
    assert len(started) == 9
    for file in (tmp_path / "finished").iterdir():
        file.write_text("{")
    compare(llama, **METHODS, **others, output=tmp_path)
    assert len(started) == 13, "damaged results are made again"
    with pytest.raises(FileExistsError, match="holds tables of LlamaForCausalLM: choose another"):
        compare(make_model("qwen3"), **METHODS, **others, output=tmp_path)


def test_pruned_models_are_kept(tmp_path, others):
    """Each with the weights that pruning alone gives. One that is gone is pruned again; the dense model is as before."""
    model, ways = make_model("llama"), {"saliencies": ["wanda"], "topups": ["uniform", "owl"], **others}
    before, config = state(model), model.config
    comparison = compare(model, **ways, output=tmp_path / "out", keep=tmp_path / "kept")
    assert same_state(model, before) and model.config is config and not hasattr(config, "sparsity_config")
    kept = sorted((tmp_path / "kept").iterdir())
    assert [folder.name[:-9] for folder in kept] == ["wanda-owl-50-sparsity", "wanda-uniform-50-sparsity"]
    pruner, alone = NeuronALPruner(NeuronALConfig(0.5, "wanda", topup="uniform", **SMALL)), make_model("llama")
    pruner.prune(alone, others["dataset"])
    assert same_state(load_model(kept[1]), state(alone)) and inspect_checkpoint(kept[1]).problems == []
    evaluation = PruningReport.load(kept[1]).evaluation["test"]
    assert evaluation["pruned"] == comparison.results[0].perplexity["test"]
    shutil.rmtree(kept[0])
    compare(model, **ways, output=tmp_path / "out", keep=tmp_path / "kept")
    assert sorted((tmp_path / "kept").iterdir()) == kept
    with pytest.raises(NotADirectoryError, match="Cannot keep models in"):
        compare("./never-looked-at", **ways, keep=kept[0] / "config.json")


@pytest.mark.parametrize(
    "parts",
    [
        [METHODS | {"topups": [topup]} for topup in METHODS["topups"]],
        [{"saliencies": [saliency], "topups": ["uniform"]} for saliency in ("magnitude", "wanda")],
    ],
)
def test_commands_may_share_an_output_directory(parts, llama, others, tmp_path, monkeypatch):
    """Other methods do not change what a result depends on, also that of one that looks at no text."""
    for part in parts:
        compare(llama, **part, **others, output=tmp_path)
    monkeypatch.delattr(CombinationRunner, "_measure")  # of any model, the dense one too
    whole = {name: list(dict.fromkeys(method for part in parts for method in part[name])) for name in METHODS}
    assert compare(llama, **whole, **others, output=tmp_path).results, "all were finished"


def test_a_changed_task_is_asked_again(llama, others, tmp_path, monkeypatch):
    """Questions are read once, whatever the number of combinations."""
    asked, read = [], []
    monkeypatch.setattr(comparing, "evaluate_tasks", lambda *_, batch_size, **__: asked.append(batch_size) or {})
    for files, count in (({"a.yaml": "1"}, 2), ({"a.yaml": "1"}, 2), ({"a.yaml": "2"}, 4)):
        monkeypatch.setattr(study, "load_tasks", lambda *_, files=files, **__: read.append(1) or TaskSet({}, 5, files))
        compare(llama, make_tokenizer(), **ONE, **others, tasks=["mine"], batch_size=3, output=tmp_path)
        assert len(asked) == count, "the dense model, and one that is pruned"
    assert asked[0] == 3 and len(read) == 3


def test_what_depends_on_something_else_is_run_again(llama, ids, others, tmp_path):
    methods = {"saliencies": ["wanda"], "topups": ["uniform"]}
    first = compare(llama, **methods, **others, output=tmp_path)
    for model, change in (
        (llama, {"dataset": ids[1:7]}),
        (llama, {"evaluate": {"test": ids[5:]}}),
        (llama, {"evaluate": {"test": ids[6:].reshape(-1, ids.shape[1] // 2)}}),  # the same bytes
        (llama, {"evaluate": {"test": ids[6:].flip(0, 1)}}),  # the same shape
        (make_model("llama", seed=1), {}),
    ):
        second = compare(model, **methods, **{**others, **change}, output=tmp_path)
        assert first.results[0].perplexity != second.results[0].perplexity
    again = compare(llama, **methods, **others, output=tmp_path)
    assert vars(again.results[0]) == vars(first.results[0])


@pytest.mark.parametrize("error", [None, MemoryError("too large")])
def test_one_that_fails_is_a_row_with_its_error(llama, others, tmp_path, monkeypatch, error):
    def score(self, weight, activation):
        if error is not None:
            raise error
        return weight.abs() * math.nan

    monkeypatch.setattr(SALIENCIES.get("wanda"), "score", score)
    comparison = compare(llama, **METHODS, **others, output=tmp_path)
    assert [result.error is None for result in comparison.results] == [False, False, True, True]
    assert ("too large" if error else "is not finite") in comparison.failed[0].error
    monkeypatch.undo()
    assert not compare(llama, **METHODS, **others, output=tmp_path).failed, "failures are tried again"
    for layer in llama.model.layers:
        layer.mlp.fc1 = torch.nn.Linear(32, 48)  # not used in the forward: the first method finds it
    found = compare(llama, saliencies=["wanda"], topups=["uniform", "owl"], **others).results
    assert ["fc1 and 2 others are not used" in str(result.error) for result in found] == [True, True]


def test_mistakes_are_found_before_work(llama, others, tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "find_changes", lambda *args: pytest.fail("work began"))
    with pytest.raises(ValueError, match="num_samples=100, but there are 6 sequences"):
        compare(llama, saliencies=["wanda"], topups=["uniform"], **{**others, "num_samples": 100})
    with pytest.raises(ValueError, match="nothing"):
        compare(llama, **ONE, sweep={"targets": [["q_proj"], ["nothing"]]}, **others)
    (tmp_path / "comparison.md").write_text("mine")
    with pytest.raises(FileExistsError, match="something else than a comparison"):
        compare("./never-looked-at", **METHODS, **others, output=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.md"]


@pytest.mark.parametrize(
    ("family", "ways", "plans"),
    [
        ("llama", {"topups": ["owl:outlier_factor=2", "owl", "alpha_pruning:bins=10", "alpha_pruning"]}, 4),
        ("mixtral", {"topups": DENSE_STREAM, "sweep": {"ignore": [["q_proj"], [r"layers\.0\."]]}}, 4),
        ("mixtral", {"topups": DENSE_STREAM, "sweep": {"min_expert_tokens": [1, 100]}}, 3),
    ],
)
def test_other_projections_and_hyperparameters_do_not_share_scores(ids, others, family, ways, plans):
    found = compare(make_model(family), saliencies=["wanda"], **ways, **others).results
    for result in found:
        assert_alone(result, family, ids)
    assert len({tuple(result.block_sparsity) for result in found}) == plans


@pytest.mark.parametrize(
    ("ways", "seconds"),
    [
        ({"saliencies": ["wanda", "magnitude"], "topups": ["owl"]}, [100.0, 100.0]),
        ({"saliencies": ["wanda"], "topups": ["uniform"]}, [0.0]),
    ],
)
def test_what_the_cache_gave_is_counted(llama, others, monkeypatch, ways, seconds):
    """All rows have the seconds of the scores that the first one measured, and none those of the check of the replay."""
    measure, check, clock = BlockRunner.run, BlockRunner.check_replay, [0.0]

    def slow(self, inputs, streams, visit, label=None, release=False):
        clock[0] += 100 * ("OWL" in str(label))
        return measure(self, inputs, streams, visit, label, release)

    def slow_check(self, ids):
        clock[0] += 7
        return check(self, ids)

    monkeypatch.setattr(BlockRunner, "run", slow)
    monkeypatch.setattr(BlockRunner, "check_replay", slow_check)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert [result.seconds for result in compare(llama, **ways, **others).results] == seconds
    assert clock == [max(seconds) + 7], "each is done once"


def test_a_sweep_runs_everything_with_each_value(llama, tokenizer, others, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 60}" for i in range(400)))
    given = {**others, "dataset": str(text), "seq_length": 8, "output": tmp_path / "out"}
    sweep = {"seed": [0, 1], "num_alignment_samples": [1, 2]}
    del given["num_alignment_samples"]
    found = compare(llama, tokenizer, saliencies=["wanda"], topups=["owl"], sweep=sweep, **given)
    assert [result.setting["seed"] for result in found.results] == [0, 0, 1, 1]
    assert [result.config["num_alignment_samples"] for result in found.results] == [1, 2, 1, 2]
    one, two, three, _ = [result.perplexity["test"] for result in found.results]
    assert one == two != three, "OWL has no alignment sequences, but another seed draws other text"
    assert "tokens of text.txt.\n\nMeans over seed 0, 1" in str(found) and " ± " in str(found)
    tokenizer.bos_token = "w9"
    given = {**given, "saliencies": ["wanda"], "topups": ["uniform"], "sweep": {"add_bos": [False, True]}}
    plain, with_bos = compare(llama, tokenizer, num_alignment_samples=2, **given).results
    assert plain.perplexity != with_bos.perplexity


def test_offloaded_models(ids, others, tmp_path):
    """The same results as in memory, and the files are as before."""
    methods = {"saliencies": ["wanda"], "topups": ["uniform", TUNED]}
    expected = compare(make_model("llama"), **methods, **others)
    model = disk_offload(make_model("llama"), str(tmp_path))
    model.hf_device_map = {"": "disk"}
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    found = compare(model, **methods, **others)
    assert [one.perplexity for one in found.results] == [one.perplexity for one in expected.results]
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert evaluate_perplexity(model, None, ids[6:]) == pytest.approx(expected.dense.perplexity["test"])
