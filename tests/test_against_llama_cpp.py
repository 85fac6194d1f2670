"""What benchmarks/against_llama_cpp.py does without llama.cpp: models, turns, plans of types, tables, load."""

import importlib
import os
import re
from pathlib import Path

import pytest
import torch
from llama_cpp_programs import flags_of, write_program, write_programs


MODULES = ("against_llama_cpp", "gguf_types", "llama_cpp_subjects", "other_load", "same_shapes")
TINY = {"hidden": 64, "intermediate": 128, "heads": 2, "key_value_heads": 1, "head_size": 32}
PLAN = """\
[   1/   4] output_norm.weight                   - [  2048,      1,      1,      1], type =    f32, size =    0.008 MiB
[   2/   4] token_embd.weight                    - [  2048,    512,      1,      1], type =   bf16, size =     2.00 MiB ->     0.82 MiB (q6_K)
[   3/   4] blk.0.attn_k.weight                  - [  2048,    512,      1,      1], type =   bf16, size =     2.00 MiB ->     0.33 MiB (q2_K)
[   4/   4] blk.0.attn_v.weight                  - [  2048,    512,      1,      1], type =   bf16, size =     2.00 MiB ->     0.56 MiB (q4_K)
llama_model_quantize_impl: quant size  =     1.72 MiB (2.94 BPW)
"""


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark's modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent)
        yield {name: importlib.import_module(f"benchmarks.{name}") for name in MODULES}


@pytest.mark.parametrize("vocabulary", [16, 40])
def test_every_kind_of_packed_model_has_the_shape(benchmark, vocabulary):
    module = benchmark["same_shapes"]
    shape = module.Shape(layers=3, vocabulary=vocabulary, **TINY)
    assert shape.weights == 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    sizes = {}
    for kind in module.PACKED:
        model = module.make_model(kind, shape)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
        assert logits.shape == (1, 3, vocabulary) and logits.isfinite().all() and len(model.model.layers) == 3
        assert [block.self_attn.layer_idx for block in model.model.layers] == [0, 1, 2]
        assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, eos_token_id=None).shape == (
            1,
            4,
        )
        assert module.projection_seconds(model, repeats=1) > 0
        sizes[kind] = module.projection_bytes(model)
    assert sizes.pop("dense, bf16") == 2 * shape.weights and all(size < 2 * shape.weights for size in sizes.values())


def test_copies_of_a_block_lie_apart(benchmark):
    module = benchmark["same_shapes"]
    blocks = module.make_model("dense, bf16", module.Shape(layers=2, vocabulary=16, **TINY)).model.layers
    first, second = (block.mlp.up_proj.weight for block in blocks)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_subjects_take_turns(benchmark, capsys):
    seen = []
    subjects = {name: lambda threads, name=name: seen.append((name, threads)) or {"work": len(seen)} for name in "ab"}
    found = benchmark["against_llama_cpp"].measure_in_turns(subjects, [1, 2], 2)
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("b", 2)] * 2
    assert found[2] == {"a": [{"work": 3}, {"work": 7}], "b": [{"work": 4}, {"work": 8}]}


def test_a_table_with_ratios_of_rounds_and_without(benchmark):
    rates = {
        "theirs": [{"decode, batch 1": 10.0, "prefill": 4.0}, {"decode, batch 1": 20.0, "prefill": 4.0}],
        "ours": [
            {"decode, batch 1": 15.0, "prefill": 1.0, "projections": 40.0},
            {"decode, batch 1": 20.0, "prefill": 2.0, "projections": 60.0},
        ],
    }
    arguments = (["decode, batch 1", "prefill"], rates, {"theirs": 2_000_000, "ours": 1_000_000}, 4, 4_000_000)
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in benchmark["against_llama_cpp"].table(*arguments, "theirs").splitlines()
    ]
    assert lines[0][3:] == ["decode, batch 1", "times", "prefill", "times", "ms a layer", "projections, ms"]
    assert lines[2] == ["theirs", "2.0", "4.00", "15.0", "1.00", "4.0", "1.00", "16.67", ""]
    assert lines[3] == ["ours", "1.0", "2.00", "17.5", "1.25", "1.5", "0.38", "14.29", "20.00"]
    assert "times" not in benchmark["against_llama_cpp"].table(*arguments, None)


@pytest.mark.parametrize("others, despite, base, warned", [
    (0.4, False, "first", ""), (0.6, False, None, "0.6 cores meanwhile: .*; ratios are left out"),
    (0.6, True, "first", "0.6 cores meanwhile: [^;]*$"), (None, False, None, "an unknown share"),
])  # fmt: skip
def test_ratios_need_an_idle_machine(benchmark, others, despite, base, warned, capsys):
    assert benchmark["against_llama_cpp"].base_of(["first", "second"], others, despite) == base
    printed = capsys.readouterr().out
    assert bool(printed) == bool(warned) and re.search(warned, printed)


def test_both_sides_measure_the_same_work(benchmark, tmp_path, monkeypatch):
    """Rates are tokens of all sequences in a second; processor time is the difference of two runs of llama-bench."""
    module, models = benchmark["llama_cpp_subjects"], benchmark["same_shapes"]
    work = module.Work([1, 2, 3], 9, 4, write_programs(tmp_path / "programs"), set())
    model = models.make_model("dense, bf16", models.Shape(layers=1, vocabulary=16, **TINY))
    monkeypatch.setattr(module, "projection_seconds", lambda *_, **__: 0.5)
    monkeypatch.setattr(module, "prefill_seconds", lambda model, tokens: 3.0)
    monkeypatch.setattr(module, "decode_seconds", lambda model, batch, new, clock=None: batch / (10 if clock else 1))
    ours = module.packed_subject(model, work)(1)
    assert ours == dict(zip(work.names, (4.0, 4.0, 4.0, 3.0))) | {module.PROJECTIONS: 2.0}
    assert module.packed_cpu_subject(model, work)(1) == {module.SINGLE: 40.0, module.PROJECTIONS: 2.0}
    theirs = module.gguf_subject(tmp_path / "Q4_0.gguf", work)(1)
    assert theirs == dict(zip(work.names, (12.0, 22.0, 32.0, 90.0))) and work.builds == {"7 (abc)"}
    spent = iter([1.0, 3.5, 3.5, 5.0])
    monkeypatch.setattr(module.os, "times", lambda: os.times_result((0, 0, seconds := next(spent), seconds, 0)))
    assert module.gguf_cpu_subject(tmp_path / "Q4_0.gguf", work)(1) == {module.SINGLE: 4 / (2 * 2.5 - 2 * 1.5)}
    assert flags_of(work.programs, "llama-bench")["-n"] == "1"


def test_the_plan_of_types(benchmark, tmp_path):
    planned_types = benchmark["gguf_types"].planned_types
    write_program(tmp_path, "llama-quantize", PLAN)
    plan = {"token_embd.weight": "q6_K", "blk.0.attn_k.weight": "q2_K", "blk.0.attn_v.weight": "q4_K"}
    assert planned_types(tmp_path, tmp_path / "BF16.gguf", "Q2_K") == plan
    assert (tmp_path / "llama-quantize.called").read_text().split() == ["--dry-run", f"{tmp_path}/BF16.gguf", "Q2_K"]
    write_program(tmp_path, "llama-quantize", "invalid ftype 'Q2'", status=1)
    with pytest.raises(ValueError, match="ended with status 1 and no plan for Q2: invalid ftype 'Q2'"):
        planned_types(tmp_path, tmp_path / "BF16.gguf", "Q2")


def test_load_of_other_processes(benchmark, tmp_path, monkeypatch):
    """Of 6 busy seconds in 4, this process and its children took 3."""
    module = benchmark["other_load"]
    stat = tmp_path / "stat"
    monkeypatch.setattr(module, "STAT", stat)
    monkeypatch.setattr(module.os, "sysconf", lambda name: 100)
    times, clock = iter([(1, 1, 1, 1, 0), (2, 1, 1, 3, 0)]), iter([10.0, 14.0])
    monkeypatch.setattr(module.os, "times", lambda: next(times))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    assert module.OtherLoad().cores() is None, "no such file"
    stat.write_text("cpu 100 0 100 5000 7 0 0 0 50 0\ncpu0 1 2 3\n")
    load = module.OtherLoad()
    stat.write_text("cpu 300 100 200 5900 99 100 50 50 60 0\n")
    assert load.cores() == pytest.approx((6 - 3) / 4)
