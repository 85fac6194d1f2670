"""Check and time the package on one GPU, or another accelerator, in at most 20 minutes. Please send in the JSON file.

    python -m benchmarks.gpu --output gpu.json [--model HuggingFaceTB/SmolLM2-135M-Instruct] [--minutes 18]

- checks: small models are pruned and packed on the device and on the CPU, and compared.
- packed: packed weights are timed against dense ones, in two random blocks of Llama-3.2-1B and of Llama-3.1-8B.
- prunes: methods prune two such blocks, with 128 sequences of 2,048 tokens.
- finetune: `--model` is fine-tuned, or random weights with the shapes of SmolLM2-135M.

The JSON file is written after each row, with a page beside it. The same command again measures what is missing: what failed,
and what there was no time for. `--device cpu --shape tiny` tries the program out.

Figures of two blocks are scaled to all, with what happens once, such as the logits of a search. A solver may take other
iterations on trained weights. The share of the peak counts block forwards only, without attention's products, against a large
product in bfloat16.

The preset `paper` on a real model (`benchmarks.real_model` prepares one):

    optimum-cli neuronal compare --model smollm2 --sparsity 0.5 0.6 0.7 --topup uniform --config-presets paper --seq-length 2048
"""

import argparse
import copy
import functools
import gc
import json
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.decoding import SHAPES as LLAMA
from benchmarks.decoding import VOCABULARY
from benchmarks.gpu_checks import (
    ALPS,
    AUTHORS,
    NEURONAL,
    REFIT,
    SPARSEGPT,
    TIMED,
    WANDA,
    difference,
    find_checks,
    prune,
    random_ids,
)
from benchmarks.shared import milliseconds, peak_teraflops, random_llama, share_of_peak, zero_randomly
from optimum_neuronal import FinetuneConfig, NeuronALConfig, NeuronALPruner, finetune, sparsify
from optimum_neuronal.common.display import format_bytes, format_duration, format_markdown
from optimum_neuronal.common.torch_state import default_device, peak_memory, reset_peak_memory
from optimum_neuronal.demo.run import TINY_MODEL
from optimum_neuronal.evaluation.speed import measure_speed
from optimum_neuronal.files.output import write_atomically
from optimum_neuronal.files.records import versions
from optimum_neuronal.packed.grouped_weight import find_kernels


@dataclass(frozen=True)
class Shape:
    """A model of which two blocks are measured."""

    fields: dict  # of its config
    blocks: int  # of the whole model
    samples: int = 128  # calibration sequences
    tokens: int = 2048  # of each, and of a prompt
    product: int = 8192  # rows of the product that finds the peak


BLOCKS = 2
GROUPED = {"num_key_value_heads": 8, "vocab_size": VOCABULARY}
SHAPES = {
    "tiny": Shape({"hidden_size": 64}, 4, samples=16, tokens=16, product=128),
    "1b": Shape({**LLAMA["1b"], **GROUPED, "tie_word_embeddings": True}, 16),
    "8b": Shape({**LLAMA["8b-stack"], **GROUPED}, 32),
}
SMOLLM2 = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    **{"vocab_size": 49152, "tie_word_embeddings": True},
}
PARTS = {"checks": 0.15, "packed": 0.3, "prunes": 0.4, "finetune": 0.15}  # shares of the time
TITLES = {
    "checks": "Checks",
    "packed": "Dense time / packed time: two blocks with `generate`; the whole model, scaled, with CUDA graphs to decode",
    "prunes": "Prunes to 60% zeros",
    "finetune": "A fine-tune of all weights at 50% zeros, toward the dense model",
}
LABELS = ("check", "shape", "zeros", "method", "model")
SPARSITIES = (0.6, 0.7, 0.5, 0.8)  # the most important first
REPEATS, STEPS = 50, 40
MISSING = "not measured"
CHOICES = {  # rows of docs/choose.md -> how often they take the time of which prune
    "Wanda, NeuronAL": {NEURONAL: 1},
    "`paper`": {AUTHORS: 1},
    "`fast`": {ALPS: 1},
    "ALPS, NeuronAL, by formula": {ALPS: 1, NEURONAL: 1, WANDA: -1},
    "`best`, by formula": {ALPS: 1, REFIT: 6, SPARSEGPT: -6},
}
Figures = Callable[[dict], None]  # adds figures to a row


class OutOfTime(BaseException):
    """Raised by the clock, also in code that catches every `Exception`."""


def make(shape: str, device: torch.device, sparsity: float = 0.0) -> LlamaForCausalLM:
    """Return two random blocks of a shape with embeddings and head, in bfloat16."""
    fields = {**SHAPES[shape].fields, "num_hidden_layers": BLOCKS}
    with torch.device(device):
        model = random_llama(blocks=BLOCKS, tokens=SHAPES[shape].tokens + 64, **fields).to(torch.bfloat16)
    zero_randomly(model, sparsity)
    return model


def bytes_of(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def peak_of(memory: dict[str, int]) -> int:
    """Return the accelerator's peak of `peak_memory()`, or the process's without an accelerator."""
    return max((size for name, size in memory.items() if name != "host"), default=memory.get("host", 0))


@functools.cache
def teraflops(rows: int, device: torch.device) -> float:
    return peak_teraflops(rows, device, torch.bfloat16, REPEATS)


def graphed(device: torch.device, work: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Return a function that repeats work as a CUDA graph; on other devices, the work itself."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_forward(model: LlamaForCausalLM, shape: str, batch: int, tokens: int) -> tuple[float, torch.Tensor]:
    """Return the milliseconds of a forward of the whole model, and the outputs of its two blocks. There is no cache.

    A single token runs as a CUDA graph. A prompt has the logits of its last token only.
    """
    device, width = model.device, model.config.hidden_size
    hidden = torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(0)).to(device, model.dtype)
    positions = model.model.rotary_emb(hidden, torch.arange(tokens, device=device)[None])

    def blocks() -> torch.Tensor:
        x = hidden
        for block in model.model.layers:
            x = block(x, position_embeddings=positions)
        return x

    def head() -> torch.Tensor:
        return model.lm_head(model.model.norm(hidden[:, -1:]))

    output = blocks()
    works = [graphed(device, work) if tokens == 1 else work for work in (blocks, head)]
    of_blocks, of_head = (milliseconds(device, work, REPEATS) for work in works)
    return of_blocks * SHAPES[shape].blocks / BLOCKS + of_head, output


@torch.inference_mode()
def time_packed(row: dict, shape: str, sparsity: float, device: torch.device) -> None:
    """Add dense time / packed time: of two blocks with `generate`, and of the whole model. And memory."""
    dense, sizes, on_cpu = make(shape, device, sparsity), SHAPES[shape], device.type == "cpu"
    dense(random_ids(1, 8).to(device))  # libraries keep memory from the first product on
    before = 0 if on_cpu else torch.accelerator.memory_allocated(device)
    packed = sparsify(copy.deepcopy(dense))
    report = measure_speed(dense, packed, (1, 8), sizes.tokens, new_tokens=16, rounds=3)
    held = packed.get_memory_footprint() if on_cpu else torch.accelerator.memory_allocated(device) - before
    of_blocks = bytes_of(dense.model.layers)
    row["memory of blocks, packed / dense"] = (held - bytes_of(dense) + of_blocks) / of_blocks
    row |= {f"two blocks, generate, {timing.work}": timing.ratio for timing in report.timings[:-1]}
    row |= {"generate": asdict(report), "milliseconds": {}}
    works = {"prompt": (1, sizes.tokens), "decode, batch 1": (1, 1), "decode, batch 8": (8, 1)}
    for work, size in works.items():
        (slow, expected), (fast, output) = (time_forward(model, shape, *size) for model in (dense, packed))
        row[work], row["milliseconds"][work] = slow / fast, {"dense": slow, "packed": fast}
        row["largest difference"] = max(row.get("largest difference", 0.0), difference(output, expected))


def time_prune(row: dict, shape: str, method: str, device: torch.device) -> None:
    """Add seconds, memory and arithmetic of a pruning run."""
    model, sizes = make(shape, device), SHAPES[shape]
    block, peak_speed = model.model.layers[0], teraflops(sizes.product, device)
    pruner = prune(method, model, random_ids(sizes.samples, sizes.tokens, model.config.vocab_size))
    report, seconds = pruner.report, sum(pruner.report.seconds.values())
    peak, size = peak_of(report.peak_memory), bytes_of(block)
    kept = 1 - report.achieved_sparsity if pruner.config.methods.saliency.updates_weights else 0
    change = size / 16 + size * kept  # a mask, and new weights
    row["seconds"], row["seconds, all blocks"] = seconds, seconds * sizes.blocks / BLOCKS
    row["peak GB"], row["peak GB, all blocks"] = peak / 1e9, (peak + (sizes.blocks - BLOCKS) * (size + change)) / 1e9
    row["share of peak"] = share_of_peak(report.block_forwards, sizes.tokens, block, seconds, peak_speed)
    row["details"] = {"block forwards": report.block_forwards, "10^12 operations/s": peak_speed, **report.seconds}


def time_finetune(row: dict, model: str | None, tiny: bool, device: torch.device, folder: Path) -> None:
    """Add speed and memory of a fine-tune of all weights toward the dense model, at 50% zeros."""
    sizes = {"seq_length": 32, "batch_size": 2, "steps": 2} if tiny else {"seq_length": 512, "steps": STEPS}
    if model is None and tiny:
        model = str(TINY_MODEL)
    elif model is None:
        model = str(folder / "random")
        random_llama(blocks=30, tokens=2048, **SMOLLM2).save_pretrained(model)
        AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(model)
    magnitude = NeuronALConfig(0.5, dataset=None, saliency="magnitude", topup="uniform")
    NeuronALPruner.from_pretrained(model, config=magnitude).quantize(folder / "sparse")
    config = FinetuneConfig(dataset=str(TINY_MODEL / "calibration.txt"), learning_rate=1e-4, **sizes)
    reset_peak_memory()
    _, report = finetune(folder / "sparse", folder / "tuned", config, teacher=model, device=device)
    record = report.training[-1]
    row |= {"tokens": record["tokens"], "seconds, with evaluations and checkpoints": record["seconds"]}
    row |= {"tokens/s": record["tokens"] / record["seconds"], "peak GB": peak_of(peak_memory()) / 1e9}
    row["record"] = record


def plan(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict, Figures]]:
    """Yield parts, labels of rows, and functions that measure them."""
    device, tiny = args.device, args.shape == ["tiny"]
    for name, allowed, find in find_checks(device, folder):
        yield "checks", {"check": name, "allowed": allowed}, lambda row, find=find: row.update(difference=find())
    for sparsity in SPARSITIES:
        for shape in args.shape:
            measure = partial(time_packed, shape=shape, sparsity=sparsity, device=device)
            yield "packed", {"shape": shape, "zeros": f"{sparsity:.0%}"}, measure
    for method in TIMED:
        for shape in args.shape:
            measure = partial(time_prune, shape=shape, method=method, device=device)
            yield "prunes", {"shape": shape, "method": method}, measure
    model = args.model or ("demonstration" if tiny else "random, shapes of SmolLM2-135M")
    measure = partial(time_finetune, model=args.model, tiny=tiny, device=device, folder=folder)
    yield "finetune", {"model": model}, measure


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block when the time is over."""

    def stop(*_) -> None:
        raise OutOfTime

    if seconds <= 0:
        raise OutOfTime
    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def fill(row: dict, measure: Figures, seconds: float) -> None:
    """Measure a row. One that fails keeps its first figures, and says why others are missing."""
    start = time.monotonic()
    try:
        with at_most(seconds):
            measure(row)
        del row[MISSING]
    except OutOfTime:
        row[MISSING] = f"out of time after {time.monotonic() - start:.0f} s"
    except Exception as error:  # whatever a device raises: the other rows count all the same
        row[MISSING] = f"{type(error).__name__}: {error}"
    gc.collect()  # models in cycles keep the device's memory


def name_of(row: dict) -> str:
    return ", ".join(str(row[key]) for key in LABELS if key in row)


def markdown(rows: list[dict]) -> str:
    """Return a table of the figures of rows, without dicts."""
    header = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, dict)))
    cells = [[row.get(key, "") for key in header if key != MISSING] for row in rows]
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in cells]
    return format_markdown([key for key in header if key != MISSING], cells)


def choices(prunes: list[dict]) -> list[dict]:
    """Return rows for docs/choose.md: time and memory of whole models."""
    known = {(row["shape"], row["method"]): row for row in prunes if MISSING not in row}
    rows = [{"method": name} for name in CHOICES]
    for shape in dict.fromkeys(row["shape"] for row in prunes):
        for row, times in zip(rows, CHOICES.values()):
            parts = [(known.get((shape, method), {}), count) for method, count in times.items()]
            row[shape] = MISSING
            if all(part for part, _ in parts):
                seconds = sum(part["seconds, all blocks"] * count for part, count in parts)
                memory = max(part["peak GB, all blocks"] for part, count in parts)
                row[shape] = f"{format_duration(seconds)}, {format_bytes(1e9 * memory)}"
    return rows


def page(results: dict) -> str:
    """Return the results as Markdown."""
    sections = [f"# {results['machine']['device']}", "By `python -m benchmarks.gpu`.", markdown([results["machine"]])]
    for part, title in TITLES.items():
        rows = sorted(results[part], key=lambda row: (row.get("shape", ""), row.get("zeros", "")))
        sections += [f"## {title}", markdown(rows)]
    sections += ["## Choose a method", "All blocks, 60% zeros.", markdown(choices(results["prunes"]))]
    missing = [[part, name_of(row), row[MISSING]] for part in PARTS for row in results[part] if MISSING in row]
    sections += ["## Not measured", format_markdown(["part", "row", "why"], missing)] if missing else []
    return "\n\n".join(sections) + "\n"


def read(args: argparse.Namespace) -> dict:
    """Return what the output file holds. Stop if another machine measured it."""
    name = getattr(torch.get_device_module(args.device), "get_device_name", str)(args.device)
    triton = args.device.type != "cpu" and find_kernels(args.device) is not None
    machine = {"device": name, "triton": triton, **versions()}
    now = datetime.now(timezone.utc).isoformat(timespec="minutes")
    empty = {"machine": {**machine, "date": now}, **{part: [] for part in PARTS}}
    results = json.loads(args.output.read_bytes()) if args.output.exists() else empty
    if not machine.items() <= results["machine"].items():
        raise SystemExit(f"{args.output} is of {results['machine']}, and this is {machine}: choose another --output.")
    return results


def write(args: argparse.Namespace, results: dict) -> None:
    write_atomically(args.output, (json.dumps(results, indent=1) + "\n").encode())
    write_atomically(args.page or args.output.with_suffix(".md"), page(results).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="(default: gpu.json)")
    parser.add_argument("--page", type=Path, help="(default: beside the output)")
    parser.add_argument("--device", type=torch.device, default=default_device(), help="(default: the accelerator)")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b", "8b"], help="(default: 1b 8b)")
    parser.add_argument("--model", help="folder or Hub id to fine-tune (default: random weights)")
    parser.add_argument("--minutes", type=float, default=18, help="of this run (default: 18)")
    args = parser.parse_args()
    if args.device.type == "cpu" and args.shape != ["tiny"]:
        parser.error("the device is the CPU: expected an accelerator, or --device cpu --shape tiny")
    logging.disable_progress_bar()
    results, missing, start = read(args), [], time.monotonic()
    ends = dict(zip(PARTS, accumulate(PARTS.values())))
    with tempfile.TemporaryDirectory() as folder:
        for part, label, measure in plan(args, Path(folder)):
            row = next((row for row in results[part] if label.items() <= row.items()), None)
            if row is None:
                row = {**label, MISSING: "not reached"}
                results[part].append(row)
            if MISSING in row:
                missing.append((part, row, measure))
        write(args, results)
        for part, row, measure in missing:
            began = time.monotonic()
            fill(row, measure, start + 60 * args.minutes * ends[part] - began)
            write(args, results)
            outcome = row.get(MISSING, "measured")
            print(f"{part}: {name_of(row)}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
    failed = [row["check"] for row in results["checks"] if not row.get("difference", math.inf) <= row["allowed"]]
    if failed:
        raise SystemExit(f"Checks that did not pass: {'; '.join(failed)}. Please send in the file all the same.")


if __name__ == "__main__":
    main()
