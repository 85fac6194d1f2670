import json
import os

import pytest
import torch
from safetensors.torch import load_file
from sparse_checkpoints import save_pruned

from optimum_neuronal.checkpoint.own_files import MARK
from optimum_neuronal.evaluation import perplexity


SMALL = ("--num-samples", 8, "--num-alignment-samples", 2, "--seq-length", 16)
SMALL += ("--topup", "neuronal:block_lambdas=[0.05,0.1],row_lambdas=[0.0,0.1]", "--saliency", "wanda")
PLAIN = ("--saliency", "magnitude", "--topup", "uniform")
FEW_WINDOWS = ("--seq-length", 16, "--max-windows", 3)


def test_streaming_gives_the_same_model(run, dense, tmp_path):
    for name, flags in (("whole", ()), ("streamed", ("--stream", "--device", "cpu"))):
        run("prune", "--model", dense, "--output", tmp_path / name, "--sparsity", 0.7, "--dataset", tmp_path / "text.txt",
            *SMALL, *flags)  # fmt: skip
    whole, streamed = {}, {}
    for name, weights in (("whole", whole), ("streamed", streamed)):
        for file in (tmp_path / name).glob("*.safetensors"):
            weights.update(load_file(file))
    assert whole.keys() == streamed.keys() and all(torch.equal(whole[key], streamed[key]) for key in whole)
    assert not list(tmp_path.glob(".*")), "the folder for rewritten weights is gone"


def test_the_packed_format(run, dense, tmp_path):
    arguments = ["prune", "--model", dense, "--sparsity", 0.7, *PLAIN, "--format", "packed", "--output"]
    shown = run(*arguments, tmp_path / "packed")
    assert "import optimum_neuronal" in shown
    assert (tmp_path / "packed" / "packed-00001-of-00001.safetensors").exists()
    assert not (tmp_path / "packed" / "model.safetensors").exists()
    shown = run("evaluate", "--model", tmp_path / "packed", "--dataset", tmp_path / "text.txt", *FEW_WINDOWS)
    assert "perplexity" in shown


def test_quantised_weights(run, dense, tmp_path):
    arguments = ["prune", "--model", dense, "--dataset", tmp_path / "text.txt", "--preset", "fast"]
    arguments += ["--num-samples", 12, "--num-alignment-samples", 4, "--seq-length", 16]
    arguments += ["--output", tmp_path / "bits"]
    with pytest.raises(SystemExit, match="sparsity=0.7 and bits_per_weight=6 are given, but a prune either"):
        run(*arguments, "--sparsity", 0.7, "--bits-per-weight", 6)
    with pytest.raises(SystemExit, match="--bits-per-weight needs the weights in memory: leave --stream out"):
        run(*arguments, "--bits-per-weight", 6, "--stream")
    assert not (tmp_path / "bits").exists()
    shown = run(*arguments, "--bits-per-weight", 6)
    assert "quantised, uniform rates" in shown and "asked for 6" in shown and "import optimum_neuronal" in shown
    assert "bits a weight" in run("inspect", tmp_path / "bits")
    shown = run("evaluate", "--model", tmp_path / "bits", "--dataset", tmp_path / "text.txt", *FEW_WINDOWS)
    assert "perplexity" in shown


def test_an_interrupted_prune_goes_on(run, dense, tmp_path, monkeypatch):
    arguments = ["prune", "--model", dense, "--sparsity", 0.7, "--dataset", tmp_path / "text.txt", *SMALL]
    run(*arguments, "--output", tmp_path / "undisturbed")

    def interrupt(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("optimum_neuronal.pruning.prune.apply_changes", interrupt)
        with pytest.raises(SystemExit, match="interrupted: the same command goes on from here; .*delete .*unfinished"):
            run(*arguments, "--output", tmp_path / "sparse")
    assert (tmp_path / ".sparse.unfinished").exists() and not (tmp_path / "sparse").exists()
    with pytest.raises(SystemExit, match="begun otherwise: sparsity was 0.7, is 0.6"):
        run(*[0.6 if value == 0.7 else value for value in arguments], "--output", tmp_path / "sparse")
    run(*arguments, "--output", tmp_path / "sparse")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("undisturbed", "sparse"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not (tmp_path / ".sparse.unfinished").exists()


def test_prune_saves_a_model_that_evaluate_reads(run, dense, tmp_path, monkeypatch):
    output = tmp_path / "sparse"
    text = tmp_path / "text.txt"
    arguments = [
        "--model",
        dense,
        "--output",
        output,
        "--sparsity",
        0.7,
        "--dataset",
        text,
        "--evaluate",
        text,
        *SMALL,
    ]
    read, load = [], perplexity.load_documents
    monkeypatch.setattr(perplexity, "load_documents", lambda name, *more: read.append(name) or load(name, *more))
    printed = run("prune", *arguments)
    assert read == [str(text)], "once, for both measurements"
    report = json.loads((output / "neuronal_report.json").read_text())
    assert report["evaluation"]["text.txt"].keys() == {"dense", "pruned"} and "perplexity, text.txt" in printed
    assert f"{report['evaluation']['text.txt']['pruned']:.2f}" in (output / "README.md").read_text()
    assert report["achieved_sparsity"] == pytest.approx(0.7, abs=1e-3)
    assert [c["lambda"] for c in report["decisions"]["block"]["candidates"]] == [0.05, 0.1]
    assert report["calibration"]["source"] == "text.txt"
    assert (
        "sparsity" in printed and "lambda of the block step" in printed and f'from_pretrained("{output}")' in printed
    )
    assert (output / "tokenizer.json").exists()
    lines = run("evaluate", "--model", output, "--dataset", text, *FEW_WINDOWS).split("\n")
    assert lines[1].split() == ["dataset", "perplexity"] and float(lines[3].split()[1]) > 1


def test_errors_are_one_line_and_leave_no_files(run, dense, tmp_path):
    """Found before a weight is loaded, in a dry run and without."""
    (dense / "model.safetensors").write_text("never looked at")
    given = {"--model": dense, "--sparsity": 0.7, "--dataset": tmp_path / "text.txt", "--seq-length": 16}
    before = sorted(tmp_path.iterdir())
    for flag, value, message in (
        ("--saliency", "wnada", "Did you mean 'wanda'"),
        ("--dataset", "missing.txt", "'missing.txt' does not exist"),
        ("--evaluate", "missing.txt", "'missing.txt' does not exist"),
        ("--model", "./nowhere", "nowhere"),
        ("--push-to-hub", "me/llama", "The Hub (refused|cannot be reached)"),
        ("--device", "cuda:99", "--device cuda:99: torch"),
        ("--targets", "qqq", "match no projection"),
        ("--seq-length", "1000", "admits 1 to 64 tokens"),
        ("--topup", "neuronal:steps=rows", "prune: error: steps is 'rows': .* Did you mean 'row'"),
        ("--num-samples", 1000, "holds 2000 tokens, but 1000 sequences"),
    ):
        for own in ({"--dry-run": None}, {"--output": tmp_path / "sparse"}):
            if flag == "--num-samples" and "--dry-run" in own:  # which draws none
                continue
            words = [word for pair in {**given, flag: value, **own}.items() for word in pair if word is not None]
            with pytest.raises(SystemExit, match=message) as stop:
                run("prune", *words)
            assert "\n" not in str(stop.value.code) and sorted(tmp_path.iterdir()) == before


def test_a_report_repeats_its_prune(run, dense, tmp_path):
    given = ("--model", dense, "--sparsity", 0.7, "--topup", "uniform", "--saliency", "wanda", "--seed", 3, *SMALL)
    run("prune", *given, "--dataset", tmp_path / "text.txt", "--output", tmp_path / "first")
    recipe = ("--model", dense, "--config", tmp_path / "first" / "neuronal_report.json")
    recipe += ("--dataset", tmp_path / "text.txt")  # of a local file a report tells the name alone
    run("prune", *recipe, "--output", tmp_path / "again")
    run("prune", *recipe, "--sparsity", 0.5, "--output", tmp_path / "other")
    first, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again"))
    assert first == again
    report = json.loads((tmp_path / "other" / "neuronal_report.json").read_text())
    assert report["achieved_sparsity"] == pytest.approx(0.5, abs=1e-2) and report["config"]["seed"] == 3


def test_quiet_prunes_without_bars(run, dense, tmp_path):
    given = (
        "--model",
        dense,
        "--sparsity",
        0.7,
        "--dataset",
        tmp_path / "text.txt",
        *SMALL[:6],
        "--saliency",
        "wanda",
    )
    given += ("--topup", "uniform")
    run("prune", *given, "--output", tmp_path / "loud")
    assert "Pruning\n" in run.err
    run("prune", *given, "--output", tmp_path / "sparse", "--quiet")
    assert run.err == ""


def test_places_that_cannot_be_used_are_refused_before_loading(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "taken" / "config.json").mkdir(parents=True)
    for flags, message in (
        (("--output", "file"), "file is a file. Choose another directory"),
        (("--output", ""), "the name is empty"),
        (("--output", "out", "--work-dir", ""), "Cannot record in --work-dir '': the name is empty"),
        (("--output", "out", "--work-dir", "out"), "The work directory out is also the output out: name another"),
        (("--output", "w/model", "--work-dir", "w"), "The work directory w holds the output w/model"),
        (("--output", "out", "--work-dir", "file"), "record in --work-dir file: .*file is a file"),
        (("--output", "taken"), "taken/config.json is a folder in the way: rename it or choose another directory"),
        (("--output", os.fsdecode(b"\xff")), "the name is not UTF-8"),
    ):
        with pytest.raises(SystemExit, match=message) as stop:
            run("prune", "--model", "me/never-looked-at", "--sparsity", 0.7, *flags)
        str(stop.value.code).encode()
        assert sorted(os.listdir(tmp_path)) == ["file", "taken"] and (tmp_path / "file").read_text() == "precious"
    with pytest.raises(SystemExit, match="--sparsity is missing: .* --config"):
        run("prune", "--model", "me/never-looked-at", "--output", "out")


def test_a_work_directory_whose_parent_cannot_be_written_is_refused_before_loading(run, tmp_path, monkeypatch):
    closed, access = tmp_path / "closed", os.access
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(closed) and access(path, mode))
    with pytest.raises(SystemExit, match="record in --work-dir .*work: no permission to write in .*closed"):
        run("prune", "--model", "me/never-looked-at", "--sparsity", 0.7, "--output", tmp_path / "o", "--work-dir",
            closed / "work")  # fmt: skip


def test_what_a_killed_stream_has_left_is_removed(run, dense, tmp_path):
    left = tmp_path / ".o.weights-0123abcd"
    left.mkdir()
    (left / "weights.dat").write_text("large")
    given = ("--model", dense, "--output", tmp_path / "o", "--sparsity", 0.5, *PLAIN)
    run("prune", *given, "--stream", "--device", "cpu")
    assert not list(tmp_path.glob(".*")) and (tmp_path / "o" / "model.safetensors").exists()


def test_methods_with_hyper_parameters_on_the_command_line(run, dense, tmp_path):
    own = ("--saliency", "ria:power=1.0", "--topup", "neuronal:steps=block,block_lambdas=[0.1]")
    given = ("--model", dense, "--dataset", tmp_path / "text.txt", "--sparsity", 0.5, *SMALL[:6])
    run("prune", *given, *own, "--output", tmp_path / "o")
    config = json.loads((tmp_path / "o" / "config.json").read_text())["sparsity_config"]["config"]
    assert config["saliency"] == "ria" and config["saliency_args"] == {"power": 1.0}
    assert config["topup_args"] == {"steps": "block", "block_lambdas": [0.1]}


@pytest.mark.parametrize("saliency", ["magnitude", "wanda", "sparsegpt"])
def test_a_pattern_on_the_command_line(run, dense, tmp_path, saliency):
    own = ("--saliency", saliency, "--topup", "uniform", "--pattern", "2:4", "--sparsity", 0.5, *SMALL[:6])
    run("prune", "--model", dense, "--dataset", tmp_path / "text.txt", *own, "--output", tmp_path / "o")
    for name, weight in load_file(tmp_path / "o" / "model.safetensors").items():
        assert "_proj" not in name or ((weight.view(len(weight), -1, 4) != 0).sum(dim=-1) == 2).all(), name


def test_nothing_of_the_users_is_overwritten(run, dense, tmp_path):
    """The only dense copy, a project's own files, a card that was taken over; pruning again over what prune wrote is fine."""
    given = ("--model", dense, "--sparsity", 0.5, *PLAIN, "--output")
    before = (dense / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="is the directory that the model was read from"):
        run("prune", *given, dense, "--overwrite")
    assert (dense / "model.safetensors").read_bytes() == before
    project = tmp_path / "project"
    project.mkdir()
    (project / "README.md").write_text("# Mine")
    with pytest.raises(SystemExit, match="project holds README.md, which this command did not write.*--overwrite"):
        run("prune", *given, project)
    assert [file.name for file in project.iterdir()] == ["README.md"]
    run("prune", *given, project, "--overwrite")
    assert (project / "README.md").read_text() == "# Mine" and (project / "model.safetensors").exists()
    for _ in range(2):
        run("prune", *given, tmp_path / "sparse")
    card = tmp_path / "sparse" / "README.md"
    card.write_text(card.read_text().replace(MARK, "My notes."))
    with pytest.raises(SystemExit, match="sparse holds README.md, which this command did not write"):
        run("prune", *given, tmp_path / "sparse")
    assert "My notes." in card.read_text()


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_sparse_model_is_refused_with_advice_that_fits_here(run, tmp_path, format):
    save_pruned(tmp_path / "sparse", format=format)
    for flags in (("--dry-run",), ("--output", tmp_path / "o")):
        with pytest.raises(SystemExit, match="is sparse already.*: name the dense model that it was made from"):
            run("prune", "--model", tmp_path / "sparse", "--sparsity", 0.8, "--saliency", "magnitude", *flags)


def test_a_rotated_model(run, dense, tmp_path):
    """With hyper-parameters from a file, or by the flag alone."""
    lines = ["rotate: true", "rotate_args: {steps: 3, fisher_samples: 2}", "saliency: wanda", "topup: uniform"]
    (tmp_path / "how.yaml").write_text("\n".join(lines))
    arguments = ["prune", "--model", dense, "--sparsity", 0.5, "--dataset", tmp_path / "text.txt", *SMALL[:6]]
    shown = run(*arguments, "--config", tmp_path / "how.yaml", "--output", tmp_path / "sparse")
    assert "residual stream and attention heads; objective" in shown
    config = json.loads((tmp_path / "sparse" / "neuronal_report.json").read_text())["config"]
    assert config["rotate"] is True and config["rotate_args"] == {"steps": 3, "fisher_samples": 2}
    again = tmp_path / "sparse" / "neuronal_report.json"
    run(
        "prune",
        "--model",
        dense,
        "--config",
        again,
        "--dataset",
        tmp_path / "text.txt",
        "--output",
        tmp_path / "again",
    )
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("sparse", "again"))
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    lines[1] = "rotate_args: {steps: 3, fisher_samples: 2, rows: 1}"
    (tmp_path / "how.yaml").write_text("\n".join(lines))
    run(
        *arguments, "--config", tmp_path / "how.yaml", "--stream", "--device", "cpu", "--output", tmp_path / "streamed"
    )
    third = load_file(tmp_path / "streamed" / "model.safetensors")
    assert all(torch.equal(value, third[key]) for key, value in first.items())
