import json

import pytest
from conftest import FEW, make_model, make_tokenizer
from trial_helpers import checksums

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.pruning.dry_run import dry_run


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i % 60}" for i in range(2000)))
    return str(path)


def saved(folder, family="llama"):
    """The directory of a model without its weights, and with a tokenizer."""
    make_model(family, vocab_size=256).save_pretrained(folder / "dense")
    (folder / "dense" / "model.safetensors").unlink()
    make_tokenizer().save_pretrained(folder / "dense")
    return folder / "dense"


def config(**fields):
    return NeuronALConfig(**{"sparsity": 0.7, "saliency": "wanda", "num_samples": 6, "seq_length": 16, **fields})


def plain(**fields):
    return config(topup="uniform", saliency="magnitude", **fields)


def test_what_it_shows_and_nothing_is_written(tmp_path, text):
    directory = saved(tmp_path)
    before = checksums(directory)
    run = dry_run(directory, plain(dataset="no such file"))
    assert run.hidden_bytes == 0 and "size in float32" in str(run) and "hidden states" not in str(run)
    run = dry_run(directory, config(topup="search", dataset=text))
    assert run.hidden_bytes == 6 * 16 * 32 * 4, "sequences, tokens, features, bytes"
    assert all(words in str(run) for words in ("wanda + search", "70.00% zeros", "hidden states", "beside"))
    refit = config(saliency="alps", topup="uniform", num_samples=16, refit_epochs=3, dataset=text)
    assert dry_run(directory, refit).hidden_bytes == 2 * 16 * 16 * 32 * 4, "the dense model's stream runs beside"
    assert "7 projections in 1 blocks" in str(dry_run(directory, plain(targets=[r"layers\.0\."])))
    assert "size in bfloat16" in str(dry_run(directory, plain(), dtype="bfloat16"))
    assert checksums(directory) == before


@pytest.mark.parametrize("family", FEW)
def test_sizes_are_those_of_the_pruned_model(family, tmp_path):
    pruner = NeuronALPruner(plain())
    run = dry_run(saved(tmp_path, family), pruner.config)
    pruner.prune(make_model(family, vocab_size=256))
    assert f"{len(pruner.report.projections)} projections in {len(pruner.report.blocks)} blocks" in str(run)
    assert run.size.bits_per_weight == pytest.approx(pruner.report.bits_per_weight, rel=0.02)


def test_a_checkpoint_that_becomes_dense_when_it_is_loaded(tmp_path):
    path = saved(tmp_path, "gpt_oss") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert "in 3 blocks" in str(dry_run(path.parent, plain()))


@pytest.mark.parametrize(
    ("dataset", "options", "error"),
    [
        ("chats.json", {}, ValueError),
        ("short.txt", {}, ValueError),
        ("text.txt", {"num_samples": 1000}, ValueError),  # enough for some sequences
        ("missing.txt", {}, (ValueError, OSError)),
        ("text.txt", {"seq_length": 65}, ValueError),
        ("text.txt", {"targets": ["no such projection"]}, ValueError),
    ],
)
@pytest.mark.usefixtures("text")
def test_what_pruning_refuses_is_refused(dataset, options, error, tmp_path):
    """With the same message."""
    (tmp_path / "chats.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "w1 w2"}]}]))
    (tmp_path / "short.txt").write_text("w1 w2")
    own, messages = config(dataset=str(tmp_path / dataset), topup="uniform", **options), []
    directory = saved(tmp_path)
    for attempt in (
        lambda: dry_run(directory, own),
        lambda: NeuronALPruner(own, directory).prune(make_model("llama", vocab_size=256)),
    ):
        with pytest.raises(error) as caught:
            attempt()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
