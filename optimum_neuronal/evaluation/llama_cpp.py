"""Speed of a GGUF file in llama.cpp, measured by llama.cpp's own programs: `llama-bench` and `llama-batched-bench`."""

import json
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.display import format_bytes, format_table


if TYPE_CHECKING:
    from .speed import SpeedReport

BENCH, BATCHED_BENCH = "llama-bench", "llama-batched-bench"
MAGIC = b"GGUF"
PROMPT = 16  # tokens before the generated ones, as in `speed`
INSTALL = (
    "install llama.cpp (brew install llama.cpp, winget install llama.cpp, or build it from source) and add the folder "
    "of its programs to PATH"
)


@dataclass(frozen=True)
class GgufSpeed:
    """Speed of one GGUF file in llama.cpp.

    Args:
        model (`str`): what llama.cpp calls it, with the type of its weights: `"llama 1B Q4_0"`.
        nbytes (`int`): of its tensors.
        build (`str`): of llama.cpp.
        threads (`int`): of the computation.
        rates (`dict[str, float]`):
            Tokens per second of the whole batch, medians, by kind of work; these have the names of
            [`Timing`]: `"decode, batch 1"`, `"prefill, 512 tokens"`.
    """

    model: str
    nbytes: int
    build: str
    threads: int
    rates: dict[str, float]


def find_program(name: str, folder: Path | None = None) -> str:
    """Return the path of a program of llama.cpp, in a folder or on PATH, or raise `FileNotFoundError`.

    A GGUF file's own folder is not searched: nothing that came with a model is executed.
    """
    found = shutil.which(name, path=None if folder is None else str(folder))
    if found is None:
        place = "on PATH" if folder is None else f"in {folder}"
        raise FileNotFoundError(f"There is no {name} {place}: {INSTALL}.")
    return found


def check_gguf(file: str | Path) -> None:
    """Check that `measure_gguf` can begin.

    Raises:
        `OSError`: the file cannot be read, or llama.cpp's programs are not on PATH.
        `ValueError`: the file is not a GGUF file.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"The GGUF file {file} does not exist: check its path.")
    with open(file, "rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(f"{file} is not a GGUF file: it begins with {start!r}, expected {MAGIC!r}.")
    for name in (BENCH, BATCHED_BENCH):
        find_program(name)


def measure_gguf(
    file: str | Path,
    threads: int,
    batches: Sequence[int] = (1, 4, 8),
    prompt_tokens: int = 512,
    new_tokens: int = 32,
    rounds: int = 5,
    cpu: bool = True,
    folder: Path | None = None,
) -> GgufSpeed:
    """Time a prefill and one sequence with `llama-bench`, and several sequences with `llama-batched-bench`.

    Both warm up by themselves.

    Args:
        file (`str | Path`): a GGUF file.
        threads, batches, prompt_tokens, new_tokens, rounds: as in [`measure_speed`]; one sequence is always timed.
        cpu (`bool`): True to leave all layers on the CPU.
        folder (`Path`, *optional*): with llama.cpp's programs; None: they are on PATH.

    Raises:
        `FileNotFoundError`: there is no such program.
        `RuntimeError`: it failed. The message has the last line of its errors.
        `ValueError`: it printed something else than results.
    """
    shared = ["-t", threads, *(["-ngl", 0] if cpu else [])]
    flags = ["-p", prompt_tokens, "-n", new_tokens, "-r", rounds, "-o", "json"]
    output = _run(find_program(BENCH, folder), file, shared + flags)
    try:
        found = json.loads(output)
        rates = {_work_of(one): statistics.median(one["samples_ts"]) for one in found}
        first = found[0]
        build = f"{first['build_number']} ({first['build_commit']})"
        model, nbytes = first["model_type"], first["model_size"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{BENCH} did not print its results as JSON: {output[:200]!r}. Try a newer one.") from error
    if several := sorted({batch for batch in batches if batch > 1}):
        # Its last line may be lost, since its log's thread ends with the program: a token more comes after what counts.
        counts = [new_tokens] * rounds + [1]
        flags = ["-npp", PROMPT, "-ntg", _listed(counts), "-npl", _listed(several), "--output-format", "jsonl"]
        flags += ["-c", several[-1] * (PROMPT + new_tokens)]
        rates |= _batched_rates(_run(find_program(BATCHED_BENCH, folder), file, shared + flags), several, new_tokens)
    return GgufSpeed(model, nbytes, build, threads, rates)


def format_beside(report: "SpeedReport", gguf: GgufSpeed) -> str:
    """Return a table of the packed model beside a GGUF file, for the kinds of work that both did."""
    rows = []
    for timing in report.timings:
        if timing.work in gguf.rates:
            other = gguf.rates[timing.work]
            rows.append([timing.work, f"{timing.packed:.1f}", f"{other:.1f}", f"{timing.packed / other:.2f}"])
    sizes = report.packed_bytes, gguf.nbytes
    rows.append(["bytes", *map(format_bytes, sizes), f"{sizes[0] / max(1, sizes[1]):.2f}"])
    about = f"{gguf.model} in llama.cpp {gguf.build}, timed after the packed model, not in turns with it"
    return f"{about}\n\n{format_table(['tokens per second', 'packed', 'llama.cpp', 'times'], rows)}"


def _work_of(result: dict[str, Any]) -> str:
    return "decode, batch 1" if result["n_gen"] else f"prefill, {result['n_prompt']} tokens"


def _batched_rates(output: str, batches: Sequence[int], new_tokens: int) -> dict[str, float]:
    """Return medians by kind of work of the lines that `llama-batched-bench` printed."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    rates = {}
    for batch in batches:
        own = [line["speed_tg"] for line in lines if (line["pl"], line["tg"]) == (batch, new_tokens)]
        if not own:
            raise ValueError(f"{BATCHED_BENCH} printed nothing for {batch} sequences: {output[:200]!r}.")
        rates[f"decode, batch {batch}"] = statistics.median(own)
    return rates


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _run(program: str, file: str | Path, flags: Sequence[Any]) -> str:
    """Return what a program of llama.cpp prints on a file."""
    done = subprocess.run([program, "-m", str(file), *map(str, flags)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it printed no error")
        raise RuntimeError(f"{Path(program).name} ended with status {done.returncode} on {file}: {said}")
    return done.stdout
