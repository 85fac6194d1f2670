import json
import subprocess
import sys
import time

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError

from optimum_neuronal.cli.early_checks import check_model


PRUNE = ("prune", "--sparsity", "0.7", "--output", "new", "--model", "dense")
COMMANDS = (
    (("speed", "--model", "dense", "--plots", "spd.svg"), "leave the suffix out, since .png and .svg are added"),
    (("speed", "--model", "dense", "--plots", "none/spd"), "The folder of --plots none/spd does not exist"),
    (("speed", "--model", "dense", "--llama-cpp", "gone.gguf"), "The GGUF file gone.gguf does not exist"),
    (("prune", "--model", "dense", "--output", "new"), "--sparsity is missing: .* --config"),
    (("prune", "--model", "dense", "--sparsity", "0.7"), "--output is missing"),
    ((*PRUNE, "--saliency", "wnada"), "Unknown saliency 'wnada'. Did you mean 'wanda'"),
    ((*PRUNE, "--topup", "olw:m=7"), "Unknown topup 'olw'. Did you mean 'owl'"),
    (
        (*PRUNE, "--config", "gone.yaml"),
        "--config gone.yaml is not a file: check its path",
    ),
    ((*PRUNE, "--dataset", "gone.txt"), "'gone.txt' does not exist"),
    ((*PRUNE, "--dataset", "./gone"), "folder './gone' does not exist"),
    ((*PRUNE, "--dataset", "wikitext-2"), "Did you mean 'wikitext2'"),
    ((*PRUNE, "--evaluate", "c4", "gone.jsonl:code"), "'gone.jsonl' does not exist"),
    ((*PRUNE[:4], "file", *PRUNE[5:]), "file is a file"),
    ((*PRUNE[:-1], "./dens"), "The directory ./dens does not exist: check its path. Did you mean 'dense'"),
    (("compare", "--model", "dense", "--topup", "owl", "sarch"), "Did you mean 'search'"),
    (("evaluate", "--model", "dense", "--include-path", "gone"), "--include-path gone is not a folder"),
    (
        ("evaluate", "--model", "dense", "--tasks", "paper", "arc_esay"),
        "Unknown task 'arc_esay'. Did you mean 'arc_easy'",
    ),
    (("compare", "--model", "dense", "--tasks", "boolk"), "Unknown task 'boolk'. Did you mean 'boolq'"),
    (("evaluate", "--model", "empty"), "There is no config.json in empty: name the directory of a model"),
    (("convert", "dense", "--format", "packed"), "There are no weights in dense: expected model.safetensors, or"),
    (("inspect", "dense"), "There are no weights in dense"),
    (PRUNE, "There are no weights in dense"),
    (("inspect", "./gone"), "The directory ./gone does not exist"),
)


def test_mistakes_are_found_before_anything_heavy_is_imported(tmp_path):
    """In one process for all commands; each takes a part of a second."""
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    tasks = tmp_path / "lm_eval" / "tasks"  # in place of the harness, which has many files
    tasks.mkdir(parents=True)
    (tmp_path / "lm_eval" / "__init__.py").touch()
    for name in ("arc_easy", "boolq"):
        (tasks / f"{name}.yaml").write_text(f"task: {name}")
    code = (
        "import json, sys, time; from optimum_neuronal.__main__ import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv, start = ['optimum-cli', 'neuronal', *words], time.perf_counter()\n"
        "    try: main()\n"
        "    except SystemExit as stop:\n"
        "        heavy = {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n"
        "        print(json.dumps([stop.code, time.perf_counter() - start, sorted(heavy)]))\n"
    )
    arguments = [sys.executable, "-c", code, json.dumps([words for words, _ in COMMANDS])]
    result = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == len(COMMANDS), result.stderr
    for (words, message), (error, seconds, heavy) in zip(COMMANDS, found):
        with pytest.raises(SystemExit, match=message):
            raise SystemExit(error)
        assert not heavy and seconds < 2, words


def test_a_model_that_is_nowhere_is_asked_for_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen-sparse").mkdir()
    (tmp_path / "qwen-sparse" / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked, answer = [], None

    def model_info(self, name, timeout):
        asked.append(name)
        if answer is not None:
            raise answer

    monkeypatch.setattr(HfApi, "model_info", model_info)
    check_model("qwen-sparse", weights=False)
    for file in ("model-00001-of-00002.safetensors", "pytorch_model.bin", "packed.safetensors.index.json"):
        with pytest.raises(FileNotFoundError, match="no weights"):
            check_model("qwen-sparse")
        (tmp_path / "qwen-sparse" / file).touch()
        check_model("qwen-sparse")
        (tmp_path / "qwen-sparse" / file).unlink()
    assert not asked, "a directory"
    check_model("me/other")
    assert asked == ["me/other"]
    answer = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    with pytest.raises(OSError, match="neither a directory here nor a model on the Hub .* Did you mean 'qwen-sparse'"):
        check_model("qwen-sprase")
    answer = ConnectionError("Name or service not known")
    start = time.perf_counter()
    with pytest.raises(OSError, match=r"the Hub cannot be reached \(Name or service not known\)"):
        check_model("me/other")
    assert time.perf_counter() - start < 2
    for name in ("../gone", "/gone", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="does not exist: check its path"):
            check_model(name)
    assert asked == ["me/other", "qwen-sprase", "me/other"]
    cached = {("me/other", "config.json", "v2"): "/cache/config.json"}
    found = lambda name, file, revision: cached.get((name, file, revision))  # noqa: E731
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", found)
    check_model("me/other", "v2")
    with pytest.raises(OSError, match="not in the cache"):
        check_model("me/other")
