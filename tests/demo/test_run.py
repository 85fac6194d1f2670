import torch

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.demo import run
from optimum_neuronal.demo.run import load_tiny_model


def test_the_tiny_model_is_small_and_comes_with_tokenizer_and_license():
    model, tokenizer = load_tiny_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    assert sum(file.stat().st_size for file in run.TINY_MODEL.iterdir()) < 6e6
    assert "Python Software Foundation" in (run.TINY_MODEL / "NOTICE").read_text()


def test_the_table(tmp_path, monkeypatch):
    """The whole demonstration, with fewer blocks, sequences and candidates."""
    load, lines = run.load_tiny_model, []

    def two_blocks():
        model, tokenizer = load()
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
        return model, tokenizer

    small = {"num_samples": 2, "num_alignment_samples": 2}
    quick = small | {"saliency": "alps", "topup": "uniform", "saliency_args": {"iterations": 2}}
    methods = {name: {**fields, **small} for name, fields in run.METHODS.items()}
    methods["Wanda, NeuronAL"]["topup_args"] = {"block_lambdas": (0.05, 0.1), "row_lambdas": (0.0, 0.1)}
    methods["ALPS, uniform (default)"] = quick
    monkeypatch.setattr(run, "load_tiny_model", two_blocks)
    for name, value in (("METHODS", methods), ("TEST_WINDOWS", 2), ("SEQ_LENGTH", 64)):
        monkeypatch.setattr(run, name, value)
    run.run_demo(tmp_path / "saved", lines.append)
    shown = "\n".join(lines)
    rows = [line.split("  ")[0] for line in lines if "%  " in line]
    assert rows == ["dense model", "Wanda, uniform", "Wanda, NeuronAL", "ALPS, uniform (default)"]
    default = NeuronALConfig(0.7)
    assert (default.saliency, default.topup) == ("alps", "uniform"), "as the table says"
    assert "NeuronAL as its authors ran it. All other rows go beyond it." in shown
    assert f"\n{run.PROMPT}" in shown and (tmp_path / "saved" / "model.safetensors").exists()
