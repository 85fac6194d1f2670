import pytest


PRUNE = ("prune", "--sparsity", "0.7", "--output", "new", "--model", "dense")
COMMANDS = (
    (("prune", "--model", "dense", "--output", "new"), "--sparsity is missing: .* or a preset or config"),
    (("prune", "--model", "dense", "--sparsity", "0.7"), "--output is missing"),
    ((*PRUNE, "--dry-run", "--batch-size", "0"), "--batch-size is 0"),
    ((*PRUNE, "--config", "gone.json"), "--config gone.json does not exist"),
    ((*PRUNE, "--dataset", "gone.txt"), "'gone.txt' does not exist"),
    ((*PRUNE, "--dataset", "wikitext-2"), "Did you mean 'wikitext2'"),
    ((*PRUNE, "--evaluate", "c4", "gone.jsonl:code"), "'gone.jsonl' does not exist"),
    (
        (*PRUNE, "--dry-run", "--evaluate", "notes.xyz"),
        "'notes.xyz' does not exist, or is not a single file that ends in .txt",
    ),
    ((*PRUNE[:-1], "./dens"), "The directory ./dens does not exist"),
    (("evaluate", "--model", "dense", "--include-path", "gone"), "--include-path gone does not exist"),
    (("evaluate", "--model", "empty"), "There is no config.json in empty: name the directory of a model"),
    ((*PRUNE[:-1], "gone.gguf"), "The file gone.gguf does not exist"),
    ((*PRUNE[:-1], "notes.xyz"), "notes.xyz is a file: name the directory of a model, a Hub id or a .gguf"),
    ((*PRUNE[:-1], "adapter"), "adapter is a PEFT adapter: merge it into its model"),
    ((*PRUNE[:-1], "pipeline"), "pipeline is a diffusers pipeline, not a language model"),
    (("inspect", "no name"), "'no name' is neither a directory nor the id of a model on the Hub"),
    (("inspect", "./gone"), "The directory ./gone does not exist"),
)


@pytest.mark.parametrize(("words", "message"), COMMANDS)
def test_mistakes_are_found_before_anything_is_read(run, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, file in (
        ("dense", "config.json"),
        ("adapter", "adapter_config.json"),
        ("pipeline", "model_index.json"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.xyz").write_text("text of an unknown kind")
    with pytest.raises(SystemExit, match=message):
        run(*words)
    assert not (tmp_path / "new").exists()
