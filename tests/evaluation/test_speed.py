import json

import pytest
import torch
from example_figures import texts
from packed_models import make_zeroed

from optimum_neuronal import sparsify
from optimum_neuronal.evaluation import speed
from optimum_neuronal.evaluation.speed import SpeedReport, Timing, decode_seconds, measure_speed, prefill_seconds
from optimum_neuronal.evaluation.speed_figure import plot_speed


@pytest.fixture
def models():
    return make_zeroed("llama"), sparsify(make_zeroed("llama"))


def test_both_forms_are_timed_in_turns(models, monkeypatch):
    seen = []
    monkeypatch.setattr(speed, "decode_seconds", lambda model, batch, new: seen.append((model, batch)) or 2.0)
    monkeypatch.setattr(speed, "prefill_seconds", lambda model, tokens: 1.0 if model is models[0] else 4.0)
    report = measure_speed(*models, batches=(1, 3), prompt_tokens=20, new_tokens=4, rounds=2)
    assert [model is models[0] for model, _ in seen] == [True, False] * 6, "one round more, to warm up"
    assert [batch for _, batch in seen] == [1] * 6 + [3] * 6
    one, three, prefill = report.timings
    assert (one.work, one.dense, one.packed, one.ratio) == ("decode, batch 1", 2.0, 2.0, 1.0)
    assert (three.dense, three.lowest, three.highest) == (6.0, 1.0, 1.0)
    assert (prefill.work, prefill.dense, prefill.packed, prefill.ratio) == ("prefill, 20 tokens", 20.0, 5.0, 0.25)
    assert report.packed_bytes < report.dense_bytes and json.loads(json.dumps(report.to_dict()))["threads"] >= 1
    assert report.verdict == "Packed weights are slower here for: prefill, 20 tokens." and "0.25" in str(report)


def test_other_forms_beside(models, monkeypatch):
    coded = sparsify(make_zeroed("llama"), bits=4)
    taken = {id(models[0]): 4.0, id(models[1]): 2.0, id(coded): 1.0}
    monkeypatch.setattr(speed, "decode_seconds", lambda model, batch, new: taken[id(model)])
    others, left_out = {"4 bits": coded}, {"torchao int4": "no kernels"}
    numbers = {"batches": (1,), "prompt_tokens": 4, "new_tokens": 4, "rounds": 1}
    report = measure_speed(*models, **numbers, others=others, left_out=left_out)
    decode = report.timings[0]
    assert (decode.ratio, decode.others, decode.other_ratios) == (2.0, {"4 bits": 4.0}, {"4 bits": 4.0})
    assert 0 < report.other_bytes["4 bits"] < report.packed_bytes
    assert str(report).count("4 bits") == 2 and str(report).endswith("\nNot shown: torchao int4: no kernels.")
    told = json.loads(json.dumps(report.to_dict()))
    assert told["left_out"] == left_out and told["timings"][0]["others"] == {"4 bits": 4.0}


def test_tokens_are_generated_whatever_the_checkpoint_says(models):
    """As many as asked for, although every token ends the text; the generation config is put back."""
    model = models[1]
    before = model.generation_config
    before.eos_token_id = list(range(64))
    steps = []
    handle = model.register_forward_hook(lambda module, args, output: steps.append(output.logits.shape[0]))
    assert decode_seconds(model, 2, 5) > 0 and prefill_seconds(model, 7) > 0
    handle.remove()
    assert steps == [2] * 6 + [1] and model.generation_config is before


@pytest.mark.parametrize("numbers", [{"rounds": 0}, {"new_tokens": 0}, {"batches": (1, 0)}, {"prompt_tokens": -1}])
def test_numbers_below_one(models, numbers):
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        measure_speed(*models, **numbers)


def report_of(*ratios):
    timings = [Timing(f"work {index}", 1.0, ratio, ratio, ratio, ratio) for index, ratio in enumerate(ratios)]
    return SpeedReport("model", "bfloat16", "cpu", 2, timings, 100, 50, {"dense": 10**9, "packed": 4 * 10**8})


def test_verdicts():
    assert report_of(2.0, 0.5).verdict == (
        "Packed weights are faster here for: work 0. Packed weights are slower here for: work 1."
    )
    assert report_of(1.0).verdict == "Packed weights are neither faster nor slower here."
    assert "1.00 GB" in str(report_of(1.0)) and "400.00 MB" in str(report_of(1.0))


def test_modes_are_put_back(models):
    models[0].train()
    measure_speed(*models, batches=(1,), prompt_tokens=4, new_tokens=1, rounds=1)
    assert models[0].training and not torch.is_inference_mode_enabled()


def test_a_figure():
    forms = {"others": {"4 bits": 20.0}, "other_ratios": {"4 bits": 4.0}}
    timings = [
        Timing("decode, batch 1", 5.0, 12.0, 2.4, 2, 3, **forms),
        Timing("prefill", 9.0, 8.5, 0.94, 1, 1, **forms),
    ]
    written = texts(plot_speed(SpeedReport("llama-70", "bfloat16", "cpu", 2, timings, 100, 40, {})))
    assert {"2.40, 4.00 times", "0.94, 4.00 times", "decode, batch 1", "dense weights", "4 bits"} < set(written)
    assert "llama-70, bfloat16, 2 threads: packed, 0.40 of the bytes" in written
