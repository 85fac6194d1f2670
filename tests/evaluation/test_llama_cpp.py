"""llama.cpp's programs are called and read right. Stand-ins of them print what the real ones did."""

import pytest
from llama_cpp_programs import flags_of, write_program, write_programs

from optimum_neuronal.evaluation.llama_cpp import GgufSpeed, check_gguf, find_program, format_beside, measure_gguf
from optimum_neuronal.evaluation.speed import SpeedReport, Timing


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder on PATH with stand-ins of both programs."""
    folder = write_programs(tmp_path / "programs")
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03")
    return path


@pytest.mark.parametrize("cpu", [True, False])
def test_medians_of_each_kind_of_work(programs, gguf, cpu):
    speed = measure_gguf(gguf, 2, (1, 3, 2), 9, 4, rounds=3, cpu=cpu)
    rates = {"prefill, 9 tokens": 90.0, "decode, batch 1": 12.0, "decode, batch 2": 22.0, "decode, batch 3": 32.0}
    assert speed == GgufSpeed("llama 1B Q4_0", 1000, "7 (abc)", 2, rates)
    layers = {"-ngl": "0"} if cpu else {}
    shared = {"-m": str(gguf), "-t": "2"} | layers
    assert flags_of(programs, "llama-bench") == shared | {"-p": "9", "-n": "4", "-r": "3", "-o": "json"}
    batched = {"-npp": "16", "-ntg": "4,4,4,1", "-npl": "2,3", "-c": "60", "--output-format": "jsonl"}
    assert flags_of(programs, "llama-batched-bench") == shared | batched


def test_one_sequence_needs_no_batches(programs, gguf):
    (programs / "llama-batched-bench").unlink()
    assert len(measure_gguf(gguf, 1, (1,), folder=programs).rates) == 2


@pytest.mark.parametrize("prints", ["", "no JSON", "[]", "[{}]", "{}"])
def test_other_output_is_an_error(programs, gguf, prints):
    write_program(programs, "llama-bench", prints)
    with pytest.raises(ValueError, match="llama-bench did not print its results as JSON: .* Try a newer one"):
        measure_gguf(gguf, 1)


def test_a_missing_batch_is_an_error(programs, gguf):
    with pytest.raises(ValueError, match="llama-batched-bench printed nothing for 8 sequences: 'a warning"):
        measure_gguf(gguf, 1, (2, 8), 9, 4)


def test_a_failure_quotes_the_last_line(programs, gguf):
    write_program(programs, "llama-bench", "", status=3, error="loading\nunknown architecture\n")
    with pytest.raises(RuntimeError, match=r"llama-bench ended with status 3 on .*model.gguf: unknown architecture$"):
        measure_gguf(gguf, 1)


def test_checks_before_anything_is_loaded(programs, gguf, tmp_path):
    check_gguf(gguf)
    (tmp_path / "weights").write_bytes(b"PK\x03\x04")
    with pytest.raises(
        ValueError, match=r"weights is not a GGUF file: it begins with b'PK\\x03\\x04', expected b'GGUF'"
    ):
        check_gguf(tmp_path / "weights")
    with pytest.raises(FileNotFoundError, match="The GGUF file .*gone does not exist: check its path"):
        check_gguf(tmp_path / "gone")
    (programs / "llama-batched-bench").unlink()
    with pytest.raises(FileNotFoundError, match="no llama-batched-bench on PATH: install llama.cpp .* to PATH"):
        check_gguf(gguf)


def test_no_program_beside_a_model_is_run(programs, gguf, monkeypatch):
    """A model's folder may be a download, and nothing in it is executed."""
    write_program(gguf.parent, "llama-bench", "")
    monkeypatch.setenv("PATH", str(gguf.parent / "none"))
    monkeypatch.chdir(gguf.parent)
    with pytest.raises(FileNotFoundError, match="no llama-bench on PATH"):
        check_gguf(gguf)
    with pytest.raises(FileNotFoundError, match=f"no llama-bench in {gguf.parent / 'none'}"):
        find_program("llama-bench", gguf.parent / "none")


def test_a_table_of_what_both_did():
    timings = [
        Timing(work, 1.0, packed, 1, 1, 1) for work, packed in (("decode, batch 1", 12.0), ("decode, batch 5", 7.0))
    ]
    report = SpeedReport("m", "bfloat16", "cpu", 1, timings, dense_bytes=4000, packed_bytes=2000, resident={})
    gguf = GgufSpeed("llama Q4_0", 1000, "7 (abc)", 1, {"decode, batch 1": 16.0, "prefill, 9 tokens": 3.0})
    about, _, header, _, decode, size = format_beside(report, gguf).splitlines()
    assert about == "llama Q4_0 in llama.cpp 7 (abc), timed after the packed model, not in turns with it"
    assert header.split() == ["tokens", "per", "second", "packed", "llama.cpp", "times"]
    assert decode.split() == ["decode,", "batch", "1", "12.0", "16.0", "0.75"]
    assert size.split() == ["bytes", "2.00", "kB", "1.00", "kB", "2.00"]
