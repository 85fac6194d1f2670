import pytest

from optimum_neuronal.demo import run as demo


def test_demo(run, tmp_path, monkeypatch):
    """The whole of it, with fewer blocks, sequences and lambdas."""
    load = demo.load_tiny_model

    def two_blocks():
        model, tokenizer = load()
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
        return model, tokenizer

    monkeypatch.setattr(demo, "load_tiny_model", two_blocks)
    small = {"num_samples": 2, "num_alignment_samples": 2}
    lambdas = {"topup_args": {"block_lambdas": (0.05, 0.1), "row_lambdas": (0.0, 0.1)}}
    quick = small | {"topup": "uniform", "saliency_args": {"iterations": 2}}
    methods = {"magnitude, uniform": {}, "Wanda, uniform": small, "Wanda, NeuronAL": small | lambdas, "default": quick}
    methods["Wanda, search"] = small | {"topup_args": {"budget": 8}}
    monkeypatch.setattr(demo, "METHODS", {name: fields | methods[name] for name, fields in demo.METHODS.items()})
    monkeypatch.setattr(demo, "BEST", {"best": {"refit_epochs": 1} | quick | {"num_samples": 16}})
    monkeypatch.setattr(demo, "SPARSITIES", (0.7, 0.8))
    monkeypatch.setattr(demo, "TEST_WINDOWS", 2)
    monkeypatch.setattr(demo, "SEQ_LENGTH", 64)
    monkeypatch.setattr(demo, "_reload", lambda directory: f"reloaded from {directory}")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(SystemExit, match="is a file"):
        run("demo", "--output", tmp_path / "file")
    for flags, rows, saved in (((), 5, "default"), (("--all",), 11, "best")):
        shown = run("demo", "--output", tmp_path / saved, *flags)
        assert "Dense perplexity:" in shown and shown.count("%  ") == rows
        sparsities = 2 if flags else 1
        assert shown.count("%  Wanda, NeuronAL  ") == shown.count(" loses least. Perplexity, in ") == sparsities
        assert f"The 70% sparse model ({saved}) is saved in" in shown
        assert f"reloaded from {tmp_path / saved}" in shown and (tmp_path / saved / "model.safetensors").exists()
