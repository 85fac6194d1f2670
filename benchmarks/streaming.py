"""Prune a model in a third of the memory that its weights take, and compare the masks with an ordinary prune.

    python -m benchmarks.streaming --directory DIR [--limit-share 0.333]

A random checkpoint with the shapes of Llama-3.2-3B is written (`make`), loaded and pruned as usual (`whole`), and pruned
and saved with its weights on disk (`streamed`), each in its own process. The last one limits its private memory
(RLIMIT_DATA: everything writable, and mapped shards) once the model is open, and verifies that the limit holds. Each
checkpoint shard holds one block, because a shard is mapped as a whole while a tensor is read. Linux only. DIR must have
space for twice the model.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from benchmarks.shared import MALLOC, resident
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.display import format_table


INDEX = "model.safetensors.index.json"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SEQUENCES = 4


def model_config(args: argparse.Namespace) -> LlamaConfig:
    """Return the config of the model, by default of Llama-3.2-3B."""
    return LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.blocks,
        num_attention_heads=args.hidden_size // args.head_size,
        num_key_value_heads=max(1, args.hidden_size // args.head_size // 3),
        head_dim=args.head_size,
        vocab_size=args.vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def make(args: argparse.Namespace) -> None:
    """Write the checkpoint, with one shard for the embeddings and one for each block."""
    folder = args.directory / "dense"
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(args)
    config.save_pretrained(folder)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    shards: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, parameter in skeleton.named_parameters():
        shards.setdefault(".".join(name.split(".")[:3]), []).append((name, parameter.shape))
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = {name: random_weight(name, shape) for name, shape in tensors}
        save_file(made, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(made, file)
        total += sum(tensor.nbytes for tensor in made.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def random_weight(name: str, shape: torch.Size) -> torch.Tensor:
    """Return a weight that depends on its name only: normal with deviation 0.02, or ones for a norm."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def whole(args: argparse.Namespace) -> None:
    """Load and prune the model as usual."""
    began = time.perf_counter()
    pruner = NeuronALPruner.from_pretrained(args.directory / "dense", config=pruning_config(), dtype="auto")
    pruner.prune(pruner.model, token_ids(args))
    measured = measurements(began, pruner)
    weights = {name: weight for name, weight in pruner.model.named_parameters() if is_pruned(name)}
    masks = {name: mask_digest(weight) for name, weight in weights.items()}
    (args.directory / "whole.json").write_text(json.dumps({**measured, "masks": masks}, indent=2), encoding="utf-8")


def streamed(args: argparse.Namespace) -> None:
    """Prune the model from its files, and save it."""
    began = time.perf_counter()
    pruner = NeuronALPruner.from_pretrained(
        args.directory / "dense",
        config=pruning_config(),
        stream_to=args.directory / "rewritten",
        device=torch.device("cpu"),
        dtype="auto",
    )
    opening = resident("VmHWM")
    limited = limit_memory(args.limit)
    pruner.quantize(args.directory / "sparse", dataset=token_ids(args))
    measured = {**measurements(began, pruner), "peak_while_opening": opening, "limited": limited}
    (args.directory / "streamed.json").write_text(json.dumps(measured, indent=2), encoding="utf-8")


def pruning_config() -> NeuronALConfig:
    """Return a config for NeuronAL over Wanda, with three candidates in each step."""
    return NeuronALConfig(
        0.7,
        num_samples=SEQUENCES,
        num_alignment_samples=SEQUENCES,
        saliency="wanda",
        topup="neuronal",
        topup_args={"block_lambdas": (0.05, 0.1, 0.2), "row_lambdas": (0.0, 0.05, 0.1)},
    )


def token_ids(args: argparse.Namespace) -> torch.Tensor:
    """Return the calibration sequences."""
    return torch.randint(0, args.vocabulary, (SEQUENCES, args.tokens), generator=torch.Generator().manual_seed(0))


def measurements(began: float, pruner: NeuronALPruner) -> dict:
    """Return what the process has used so far, and what its pruner decided."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    report = pruner.report.to_dict()
    return {
        "seconds": time.perf_counter() - began,
        "peak_resident": resident("VmHWM"),
        "read_from_disk": int(io["read_bytes"]),
        "block_bytes": sum(p.numel() * p.element_size() for p in pruner.model.model.layers[0].parameters()),
        **{key: report[key] for key in ("block_lambda", "row_lambda", "decisions", "achieved_sparsity")},
        "phases": report["seconds"],
    }


def is_pruned(name: str) -> bool:
    """Return True for the weight of a projection."""
    return name.endswith(tuple(f"{projection}.weight" for projection in PROJECTIONS))


def mask_digest(weight: torch.Tensor) -> str:
    """Return the SHA-256 of the mask of a weight."""
    return hashlib.sha256(np.packbits((weight == 0).numpy()).tobytes()).hexdigest()


def saved_masks(folder: Path) -> dict[str, str]:
    """Return the digest of every mask in a saved model, read tensor by tensor."""
    digests = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            digests |= {name: mask_digest(file.get_tensor(name)) for name in file.keys() if is_pruned(name)}  # noqa: SIM118
    return digests


def limit_memory(limit: int) -> str:
    """Limit the memory of this process. Raise `RuntimeError` if the limit has no effect."""
    before = resident("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    missing = limit - before
    np.empty(missing // 2, np.uint8)  # untouched, so that it does not become resident
    try:
        np.empty(missing + 2**20, np.uint8)
    except MemoryError:
        gigabytes = f"{missing / 2e9:.2f} GB more can be allocated, {missing / 1e9:.2f} GB cannot"
        return f"RLIMIT_DATA, {limit / 1e9:.2f} GB; {before / 1e9:.2f} GB were in use when it was set: {gigabytes}"
    raise RuntimeError("The limit is not enforced here.")


def run(step: str, limit: int = 0) -> None:
    """Run one step in its own process, with a malloc that returns freed memory at once."""
    command = [sys.executable, "-m", "benchmarks.streaming", *sys.argv[1:], "--step", step, "--limit", str(limit)]
    subprocess.run(command, env={**os.environ, **MALLOC, "MALLOC_ARENA_MAX": "1"}, check=True)


def drop_cached(folder: Path) -> None:
    """Drop the files of a folder from the system's cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(args: argparse.Namespace, size: int, limit: int) -> None:
    """Print the table, and the masks that differ."""
    results = {name: json.loads((args.directory / f"{name}.json").read_text()) for name in ("whole", "streamed")}
    expected, streamed = results["whole"]["masks"], saved_masks(args.directory / "sparse")
    different = sorted(name for name in expected.keys() | streamed.keys() if expected.get(name) != streamed.get(name))
    block = results["whole"]["block_bytes"]
    print(
        f"model {size / 1e9:.2f} GB, {args.blocks} blocks of {block / 1e6:.0f} MB; {SEQUENCES} x {args.tokens} tokens"
    )
    rows = []
    for name, result in results.items():
        sizes = [f"{result[key] / 1e9:.2f}" for key in ("peak_resident", "read_from_disk")]
        decided = f"{result['block_lambda']:g} / {result['row_lambda']:g}"
        allowed = f"{limit / 1e9:.2f}" if name == "streamed" else "none"
        rows.append([name, allowed, *sizes, f"{result['seconds']:.0f}", decided])
    header = ["", "limit GB", "resident GB", "from disk GB", "seconds", "lambda block / row"]
    print(format_table(header, rows))
    print(f"limit: {results['streamed']['limited']}")
    print(f"resident at most while opening the model: {results['streamed']['peak_while_opening'] / 1e9:.2f} GB")
    same = candidates(results["whole"]) == candidates(results["streamed"])
    print(f"decisions and their errors: {'equal' if same else 'DIFFERENT'}")
    print(f"masks: {len(expected) - len(different)} of {len(expected)} equal", *different, sep="\n")


def candidates(result: dict) -> dict:
    """Return what each step tried, with its errors."""
    return {step: decision["candidates"] for step, decision in result["decisions"].items()}


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where models and results are written")
    parser.add_argument("--limit-share", type=float, default=0.333, help="of the model's bytes (default: 0.333)")
    parser.add_argument("--hidden-size", type=int, default=3072, help="(default: 3072)")
    parser.add_argument("--intermediate-size", type=int, default=8192, help="(default: 8192)")
    parser.add_argument("--head-size", type=int, default=128, help="(default: 128)")
    parser.add_argument("--blocks", type=int, default=28, help="(default: 28)")
    parser.add_argument("--vocabulary", type=int, default=128256, help="(default: 128256)")
    parser.add_argument("--tokens", type=int, default=16, help="in each of the four sequences (default: 16)")
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step", choices=("make", "whole", "streamed", "compare"), help="only this (default: all)")
    return parser.parse_args()


def main() -> None:
    """Run one step here, or each step in its own process."""
    args = parse()
    logging.disable_progress_bar()
    if args.step in ("make", "whole", "streamed"):
        {"make": make, "whole": whole, "streamed": streamed}[args.step](args)
        return
    dense = args.directory / "dense"
    if not (dense / INDEX).exists():
        run("make")
    size = json.loads((dense / INDEX).read_text())["metadata"]["total_size"]
    limit = int(size * args.limit_share)
    if args.step is None:
        drop_cached(dense)
        run("whole")
        drop_cached(dense)
        run("streamed", limit)
    compare(args, size, limit)


if __name__ == "__main__":
    main()
