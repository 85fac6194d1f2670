from optimum_neuronal.demo import run as demo


def test_demo(run, tmp_path, monkeypatch):
    """The whole of it, with fewer blocks, sequences and lambdas."""
    load = demo.load_tiny_model

    def three_blocks():
        model, tokenizer = load()
        model.model.layers = model.model.layers[:3]
        model.config.num_hidden_layers = 3
        return model, tokenizer

    monkeypatch.setattr(demo, "load_tiny_model", three_blocks)
    small = {"num_samples": 4, "num_alignment_samples": 2}
    lambdas = {"topup_args": {"block_lambdas": (0.05, 0.1), "row_lambdas": (0.0, 0.1)}}
    methods = {"magnitude, uniform": {}, "Wanda, uniform": small, "Wanda, NeuronAL": small | lambdas}
    methods["Wanda, search"] = small | {"topup_args": {"budget": 8}}
    methods["default"] = small | {"topup": "uniform", "saliency_args": {"iterations": 6}}
    quick = {"num_samples": 16, "topup": "uniform", "refit_epochs": 1, "saliency_args": {"iterations": 6}}
    monkeypatch.setattr(demo, "BEST", {"best": small | quick})
    merged = {name: fields | methods[name] for name, fields in demo.METHODS.items()}
    monkeypatch.setattr(demo, "METHODS", merged)
    monkeypatch.setattr(demo, "TEST_WINDOWS", 2)
    printed = run("demo", "--output", tmp_path / "model")
    assert "Dense perplexity:" in printed and printed.count("%  Wanda, NeuronAL  ") == 3
    assert printed.count(" loses least. Perplexity, in multiples of the dense model's: ") == 3
    assert "The 70% sparse model (best) is saved in" in printed
    assert "70.00% of the projections' weights are zero" in printed
    assert (tmp_path / "model" / "model.safetensors").exists()
