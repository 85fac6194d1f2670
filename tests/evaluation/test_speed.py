import pytest
from packed_models import make_zeroed

from optimum_neuronal import sparsify
from optimum_neuronal.evaluation import speed
from optimum_neuronal.evaluation.speed import _summarize, decode_seconds, measure_speed, prefill_seconds


@pytest.fixture
def models():
    return make_zeroed("llama"), sparsify(make_zeroed("llama"))


def test_both_forms_are_timed_in_turns(models, monkeypatch):
    seen = []
    models[0].train()
    monkeypatch.setattr(speed, "decode_seconds", lambda model, batch, new_tokens: seen.append((model, batch)) or 2.0)
    monkeypatch.setattr(speed, "prefill_seconds", lambda model, tokens: 1.0 if model is models[0] else 4.0)
    report = measure_speed(*models, batches=(1, 3), prompt_tokens=20, new_tokens=4, rounds=2)
    assert [model is models[0] for model, _ in seen] == [True, False] * 6, "one round more, to warm up"
    assert [batch for _, batch in seen] == [1] * 6 + [3] * 6
    one, three, prefill = report.timings
    assert (one.work, one.dense, one.packed, one.ratio) == ("decode, batch 1", 2.0, 2.0, 1.0)
    assert (three.dense, three.lowest, three.highest) == (6.0, 1.0, 1.0)
    assert (prefill.work, prefill.dense, prefill.packed, prefill.ratio) == ("prefill, 20 tokens", 20.0, 5.0, 0.25)
    assert report.packed_bytes < report.dense_bytes and report.threads >= 1
    assert [timing.verdict for timing in report.timings] == ["no clear difference"] * 2 + ["slower"]
    table = repr(report)  # which a notebook shows
    assert "0.25" in table and table.count("packed / dense") == 2 and "weights and buffers" in table
    assert models[0].training, "modes are restored"


def test_models_without_a_head_do_not_generate(models):
    with pytest.raises(ValueError, match="LlamaModel has no language-model head"):
        measure_speed(models[0].model, models[1].model)


def test_the_ratio_is_that_of_the_speeds_shown():
    """Not a median of ratios, which another round may have given."""
    timing = _summarize("decode", 12, [[1.0, 0.5], [3.0, 2.0], [4.0, 3.0]])
    assert (timing.dense, timing.packed, timing.ratio) == (4.0, 6.0, 1.5)
    assert (timing.lowest, timing.highest, timing.verdict) == (4 / 3, 2.0, "faster")


def test_tokens_are_generated_whatever_the_checkpoint_says(models):
    """As many as requested, although nearly every token ends the text."""
    model, steps = models[1], []
    model.generation_config.eos_token_id = list(range(63))
    model.generation_config.num_beams = model.generation_config.num_return_sequences = 2
    model.register_forward_hook(lambda module, args, output: steps.append(output.logits.shape[0]))
    assert decode_seconds(model, 2, 5) > 0 and prefill_seconds(model, 7) > 0
    assert steps == [2] * 6 + [1]
