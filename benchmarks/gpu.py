"""Check and time the package on one GPU, or another accelerator, in at most 40 minutes. Please send in the JSON file.

    python -m benchmarks.gpu --output gpu.json [--shape 1b 7b] [--minutes 30]

First, small models are pruned and packed on the device and on the CPU, and compared. Then packed weights are timed against
dense ones, in two blocks of random weights, with the proportions of Llama-2-7B. Last, methods prune two such blocks. Seconds
and memory are scaled to all blocks, also what happens once, such as the logits of a search. A solver may take other iterations
on trained weights. The share of the peak counts block forwards only, without attention's products, against a large product in
bfloat16.

`--device cpu --shape tiny` tries the program out.
"""

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from accelerate import cpu_offload
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.packed_kernels import copied
from benchmarks.shared import milliseconds, peak_teraflops, random_llama, share_of_peak, zero_randomly
from optimum_neuronal import NeuronALConfig, NeuronALPruner, sparsify
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.common.device import default_batch_size, default_device, time_on
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.common.memory import peak_memory, reset_peak_memory
from optimum_neuronal.evaluation.speed import measure_speed
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.packed import accelerator, ops
from optimum_neuronal.packed.packed_weight import PackedWeight
from optimum_neuronal.pruning.prepare import versions


SHAPES = {  # hidden size, blocks of the whole model, vocabulary, calibration sequences, their tokens, rows of the large product
    "tiny": (64, 4, 1000, 16, 16, 128),
    "1b": (2048, 24, 32000, 128, 2048, 8192),
    "7b": (4096, 32, 32000, 128, 2048, 8192),
}
BLOCKS = 2  # that are made and pruned
CAPTURE, NEURONAL = "inputs of the dense model", "Wanda, NeuronAL"
METHODS = {
    "Wanda": {"saliency": "wanda", "topup": "uniform"},
    "SparseGPT": {"saliency": "sparsegpt", "topup": "uniform"},
    "ALPS": {"saliency": "alps", "topup": "uniform"},
    NEURONAL: {"saliency": "wanda", "topup": "neuronal"},
    "Wanda, search": {"saliency": "wanda", "topup": "search"},
    "SparseGPT, refit (1 epoch)": {"saliency": "sparsegpt", "topup": "uniform", "refit_epochs": 1},
}
# Largest share of elements in which masks may differ from the CPU's, which rounds sums differently. With ALPS, a relative
# change of weights by 1e-7 moves 5% of them.
ALLOWED = {"Wanda": 1e-3, "SparseGPT": 1e-2, "ALPS": 0.1, NEURONAL: 1e-3}
ROUNDING = 1e-3  # of float32 activations and logits, as a share of the largest
REPEATS, COPIES_BYTES = 50, 2**28


def config_of(method: str, ids: torch.Tensor) -> NeuronALConfig:
    return NeuronALConfig(0.6, dataset=None, num_samples=len(ids), **METHODS[method])


def prune(method: str, model: LlamaForCausalLM, ids: torch.Tensor, **how) -> NeuronALPruner:
    """Prune a model in place, and return the pruner."""
    pruner = NeuronALPruner(config_of(method, ids))
    pruner.prune(model, ids, **how)
    return pruner


def capture(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Return the squared norms of all projections' inputs in the dense model, and the number of block forwards."""
    runner, norms = BlockRunner(find_decoder(model), default_batch_size(ids.shape[1]), model.device), []

    def visit(_index, block, calls, streams):
        output, of_inputs = runner.replay(block, streams[0], calls)
        norms.extend(norm.value for norm in of_inputs.values())
        return [output]

    with inference(model):
        runner.run(runner.capture(ids), 1, visit, release=True)
    return norms, runner.block_forwards


def random_ids(sequences: int, tokens: int, vocabulary: int = 1000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (sequences, tokens), generator=torch.Generator().manual_seed(0))


def zeros_of(model: LlamaForCausalLM) -> torch.Tensor:
    """Return where the projections' weights are zero, in one dimension, on the CPU."""
    return torch.cat([w.flatten().cpu() == 0 for name, w in model.named_parameters() if name.endswith("_proj.weight")])


def difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the share of different elements of masks, or the largest difference as a share of the largest number."""
    if values.dtype == torch.bool:
        return float((values != expected).double().mean())
    return float((values.cpu() - expected.cpu()).abs().max() / expected.abs().max())


def find_checks(device: torch.device, folder: Path) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Yield what is checked on a small model in float32, the largest difference allowed, and a function that finds it."""
    torch.manual_seed(0)
    random_llama(64, 3, 64).save_pretrained(folder / "dense")
    load, ids = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32), random_ids(16, 32)

    def masks(method: str, on: str | torch.device = device, **how) -> torch.Tensor:
        prune(method, model := load(folder / "dense").to(on), ids, **how)
        return zeros_of(model)

    def masks_offloaded() -> torch.Tensor:
        model = cpu_offload(load(folder / "dense"), execution_device=device)
        prune(NEURONAL, model, ids).save(model, folder / "offloaded")
        return zeros_of(load(folder / "offloaded"))

    def masks_streamed() -> torch.Tensor:
        how = {"stream_to": folder / "rewritten", "device": device, "dtype": torch.float32}
        pruner = NeuronALPruner.from_pretrained(folder / "dense", config=config_of(NEURONAL, ids), **how)
        pruner.quantize(folder / "streamed", dataset=ids)
        return zeros_of(load(folder / "streamed"))

    def norms() -> float:
        on_device, on_cpu = (capture(load(folder / "dense").to(on), ids)[0] for on in (device, "cpu"))
        return max(map(difference, on_device, on_cpu))

    def logits(tokens: int) -> float:
        prune("Wanda", model := load(folder / "dense").to(device), ids)
        dense, sequence = copy.deepcopy(model), ids[:1, :tokens].to(device)
        with torch.inference_mode():
            return difference(sparsify(model)(sequence).logits, dense(sequence).logits)

    yield "inputs' norms, against the CPU", ROUNDING, norms
    for name, allowed in ALLOWED.items():
        yield (
            f"masks of {name}, against the CPU",
            allowed,
            lambda name=name: difference(masks(name), masks(name, "cpu")),
        )
    others = {
        "hidden states in CPU memory": partial(masks, NEURONAL, max_hidden_bytes=0),
        "weights in CPU memory": masks_offloaded,
        "weights on disk": masks_streamed,
    }
    for name, find in others.items():
        yield f"masks with {name}", 0.0, lambda find=find: difference(find(), masks(NEURONAL))
    for tokens in (4, 32):
        yield f"logits of packed weights, {tokens} tokens", ROUNDING, partial(logits, tokens)


def peak_figures(rows: int, device: torch.device) -> dict:
    return {str(dtype): peak_teraflops(rows, device, dtype, REPEATS) for dtype in (torch.bfloat16, torch.float32)}


def make(shape: str, device: torch.device, sparsity: float = 0.0) -> LlamaForCausalLM:
    """Return a random model with a few blocks of a shape, in bfloat16."""
    hidden, _, vocabulary, _, tokens, _ = SHAPES[shape]
    model = random_llama(hidden, BLOCKS, tokens + 64, vocab_size=vocabulary).to(torch.bfloat16)
    zero_randomly(model, sparsity)
    return model.to(device)


def prune_figures(shape: str, method: str, device: torch.device, teraflops: float) -> dict:
    """Return seconds, memory and arithmetic of a prune, or of capturing inputs."""
    _, blocks, vocabulary, samples, tokens, _ = SHAPES[shape]
    ids, model = random_ids(samples, tokens, vocabulary), make(shape, device)
    block = model.model.layers[0]
    if method == CAPTURE:
        reset_peak_memory()
        start = time_on(device)
        forwards = capture(model, ids)[1]
        phases, memory = {"capture": time_on(device) - start}, peak_memory()
    else:
        report = prune(method, model, ids).report
        phases, memory, forwards = report.seconds, report.peak_memory, report.block_forwards
    seconds = sum(phases.values())
    peak = max((size for name, size in memory.items() if name != "host"), default=memory.get("host", 0))
    return {
        "seconds": seconds,
        "seconds, all blocks": seconds * blocks / BLOCKS,
        "peak GB": peak / 1e9,
        "peak GB, all blocks": (peak + (blocks - BLOCKS) * sum(weight.nbytes for weight in block.parameters())) / 1e9,
        "block forwards": forwards,
        "share of peak": share_of_peak(forwards, tokens, block, seconds, teraflops),
        "phases": phases,
    }


def packed_figures(shape: str, sparsity: float, device: torch.device) -> dict:
    """Return dense time / packed time, of products with one projection and of the few blocks."""
    dense = make(shape, device, sparsity)
    packed, weight, ratios = sparsify(copy.deepcopy(dense)), dense.model.layers[0].mlp.up_proj.weight.data, {}
    # Copies take turns, so that none is in a cache.
    matrix, count = PackedWeight.pack(weight), min(max(2, COPIES_BYTES // weight.nbytes), REPEATS)
    weights, matrices = cycle([weight.clone() for _ in range(count)]), cycle([copied(matrix) for _ in range(count)])
    for tokens in (1, 8, 64):
        x = torch.randn(tokens, weight.shape[1]).to(weight)
        slow = milliseconds(device, lambda x=x: linear(x, next(weights)), REPEATS)
        fast = milliseconds(device, lambda x=x: ops.linear(next(matrices), x), REPEATS)
        ratios[f"product, {tokens} tokens"] = slow / fast
    report = measure_speed(dense, packed, batches=(1, 8), prompt_tokens=SHAPES[shape][4], new_tokens=16, rounds=3)
    return ratios | {timing.work: timing.ratio for timing in report.timings} | {"report": asdict(report)}


def markdown(rows: list[dict]) -> str:
    """Return a table of what rows hold, without dicts."""
    header = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, dict)))
    cells = [[row.get(key, "") for key in header] for row in rows]
    return format_markdown(header, [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="(default: gpu.json)")
    parser.add_argument("--device", type=torch.device, default=default_device(), help="(default: the accelerator)")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b", "7b"], help="(default: 1b 7b)")
    parser.add_argument("--minutes", type=float, default=30, help="after which no row is started (default: 30)")
    args = parser.parse_args()
    device, on_cpu = args.device, args.device.type == "cpu"
    if on_cpu and args.shape != ["tiny"]:
        parser.error("the device is the CPU: expected an accelerator, or --device cpu --shape tiny")
    logging.disable_progress_bar()
    name = getattr(torch.get_device_module(device), "get_device_name", str)(device)
    triton = not on_cpu and accelerator.find_kernels(device) is not None
    tables = {"machine": [{"device": name, "triton": triton, **versions()}]}
    deadline = time.monotonic() + 60 * args.minutes

    def add(table: str, label: dict, figures: Callable[..., dict], *arguments) -> dict:
        """Add a row to a table, and write the file. A row that fails or comes too late says so."""
        try:
            if time.monotonic() > deadline:
                raise TimeoutError("not started: out of time")
            row = label | figures(*arguments)
        except Exception as error:  # whatever a device raises: the other rows count all the same
            row = label | {"error": f"{type(error).__name__}: {error}"}
        tables.setdefault(table, []).append(row)
        args.output.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
        return row

    with tempfile.TemporaryDirectory() as folder:
        for name, allowed, find in find_checks(device, Path(folder)):
            add("checks", {"check": name, "allowed": allowed}, lambda find=find: {"difference": find()})
    for shape in args.shape:
        label = {"shape": shape}
        peak = add("peak, 10^12 operations per second", label, peak_figures, SHAPES[shape][-1], device)
        for sparsity in (0.5, 0.6, 0.7, 0.8):
            row = label | {"sparsity": f"{sparsity:.0%}"}
            add("packed, dense time / packed time", row, packed_figures, shape, sparsity, device)
        for method in (CAPTURE, *METHODS):
            teraflops = peak.get("torch.bfloat16", math.nan)
            add("prunes", label | {"method": method}, prune_figures, shape, method, device, teraflops)
    for table, rows in tables.items():
        print(f"{table}\n\n{markdown(rows)}\n")
    if failed := [row["check"] for row in tables["checks"] if not row.get("difference", math.inf) <= row["allowed"]]:
        raise SystemExit(f"Failed checks: {'; '.join(failed)}. Please send in the file all the same.")


if __name__ == "__main__":
    main()
