"""Compare packed models with llama.cpp's quantized types on the same machine, alternately.

    pip install -e ".[benchmarks-llama]"
    python -m benchmarks.against_llama_cpp build --folder DIR
    python -m benchmarks.against_llama_cpp run --llama-cpp DIR/llama_cpp_python-0.3.36/vendor/llama.cpp/build/bin

`build` compiles llama.cpp for this processor from the sdist of llama-cpp-python, in ten minutes or more. `run` needs
llama-bench, llama-batched-bench, llama-quantize and libggml-base in one folder.

All models have the shapes of Llama-3.2-1B with random weights, on which speed does not depend, and a vocabulary of 512, so
that decoding is little else than the projections. Bytes are those of the projections.
"""

import argparse
import ctypes
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.shared import zero_randomly
from optimum_neuronal import sparsify
from optimum_neuronal.common.display import format_table
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.evaluation.speed import decode_seconds, prefill_seconds


VERSION = "0.3.36"  # of llama-cpp-python
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF",
)  # fmt: skip
# GCC 12 drops the stores to the tile configuration, and llama.cpp's AMX kernels crash.
LOAD = "    _tile_loadconfig(&tc);"
BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'
HIDDEN, INTERMEDIATE, KEYS, HEADS, VOCABULARY = 2048, 8192, 512, 32, 512
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (KEYS, HIDDEN), "attn_v": (KEYS, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INTERMEDIATE, HIDDEN), "ffn_up": (INTERMEDIATE, HIDDEN), "ffn_down": (HIDDEN, INTERMEDIATE),
}  # fmt: skip
FORMS = ("dense", "packed")  # the latter with 70% zeros
PLANNED = re.compile(r"\] (\S+)\s+- \[.*\((\S+)\)\s*$", re.MULTILINE)  # name and type of a tensor
Measure = Callable[[int], list[float]]  # number of threads -> tokens per second, for each kind of work


def build(folder: Path) -> None:
    """Build llama.cpp's programs in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if not source.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*pip, "--dest", folder, f"llama-cpp-python=={VERSION}"], check=True)
        with tarfile.open(folder / f"llama_cpp_python-{VERSION}.tar.gz") as sdist:
            sdist.extractall(folder, filter="data")
    amx = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    text = amx.read_text(encoding="utf-8")
    if BARRIER not in text:
        amx.write_text(text.replace(LOAD, BARRIER + LOAD), encoding="utf-8")
    targets = ("llama-bench", "llama-batched-bench", "llama-quantize")
    subprocess.run(["cmake", "-S", source, "-B", source / "build", *FLAGS], check=True)
    subprocess.run(["cmake", "--build", source / "build", "-j", "2", "--target", *targets], check=True)
    print(f"--llama-cpp {source / 'build' / 'bin'}")


def quantizer(programs: Path):
    """Return a function that gives rows of quantized random weights: (type, rows, columns) -> uint8 array."""
    import gguf

    library = ctypes.CDLL(str(next(programs.glob("*ggml-base.*"))))
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.ggml_row_size.restype = library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = (ctypes.c_int, size)
    library.ggml_quantize_chunk.argtypes = (ctypes.c_int, pointer, pointer, size, size, size, pointer)

    @cache
    def some_rows(kind, columns: int) -> np.ndarray:  # 64, which are repeated: some types take minutes for a model
        values = np.random.default_rng(0).standard_normal((64, columns), dtype=np.float32) * 0.02
        if kind == gguf.GGMLQuantizationType.BF16:
            return gguf.quants.quantize(values, kind)
        rows = np.zeros((64, library.ggml_row_size(kind, columns)), np.uint8)
        importance = np.ones(columns, np.float32)
        library.ggml_quantize_chunk(kind, values.ctypes.data, rows.ctypes.data, 0, 64, columns, importance.ctypes.data)
        return rows

    return lambda kind, rows, columns: np.resize(some_rows(kind, columns), (rows, some_rows(kind, columns).shape[1]))


def write_gguf(target: Path, layers: int, weights, plan: dict[str, str], kind: str) -> int:
    """Write a model whose tensors have the types of a plan, bfloat16 by default. Return the projections' bytes."""
    import gguf

    writer = gguf.GGUFWriter(target, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS * HEADS // HIDDEN)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    norm, total = np.ones(HIDDEN, dtype=np.float32), 0

    def add(name: str, rows: int, columns: int) -> int:
        tensor_type = gguf.GGMLQuantizationType[plan.get(name, "bf16").upper()]
        data = weights(tensor_type, rows, columns)
        writer.add_tensor(name, data, raw_dtype=tensor_type)
        return data.nbytes

    add("token_embd.weight", VOCABULARY, HIDDEN)
    writer.add_tensor("output_norm.weight", norm)
    for block in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{block}.{name}.weight", norm)
        total += sum(add(f"blk.{block}.{name}.weight", *shape) for name, shape in SHAPES.items())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def planned_types(programs: Path, file: Path, kind: str) -> dict[str, str]:
    """Return the type that llama-quantize would give each tensor of a file."""
    command = [programs / "llama-quantize", "--dry-run", file, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(PLANNED.findall(done.stdout + done.stderr))


def make_model(form: str, layers: int) -> LlamaForCausalLM:
    """Return a random model in one of the `FORMS`."""
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KEYS * HEADS // HIDDEN, vocab_size=VOCABULARY, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().bfloat16()
    if form == "packed":
        zero_randomly(model, 0.7)
        sparsify(model)
    return model


def measure_here(model: LlamaForCausalLM, args: argparse.Namespace) -> Measure:
    def measure(threads: int) -> list[float]:
        torch.set_num_threads(threads)
        with inference(model):
            rates = [batch * args.new_tokens / decode_seconds(model, batch, args.new_tokens) for batch in args.batches]
            return [*rates, args.prompt_tokens / prefill_seconds(model, args.prompt_tokens)]

    return measure


def measure_gguf(file: Path, args: argparse.Namespace) -> Measure:
    new, prompt = args.new_tokens, args.prompt_tokens

    def call(program: str, *flags) -> str:
        command = [args.llama_cpp / program, "-m", file, "-ngl", 0, *flags]
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout

    def measure(threads: int) -> list[float]:
        output = call("llama-bench", "-t", threads, "-p", prompt, "-n", new, "-r", 1, "-o", "json")
        rates = {(one["n_gen"] > 0): statistics.median(one["samples_ts"]) for one in json.loads(output)}
        several = [batch for batch in args.batches if batch > 1]
        # The last line may be lost when the program ends, so one more token is generated after what counts.
        flags = ["-npp", 16, "-ntg", f"{new},1", "-npl", ",".join(map(str, several)), "--output-format", "jsonl"]
        output = call("llama-batched-bench", "-t", threads, "-c", max(args.batches) * (16 + new), *flags)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        speed = {line["pl"]: line["speed_tg"] for line in lines if line["tg"] == new}
        return [*(rates[True] if batch == 1 else speed[batch] for batch in args.batches), rates[False]]

    return measure


def run(args: argparse.Namespace) -> None:
    """Make the models, measure them alternately, and print a table for each number of threads."""
    weights = args.layers * sum(rows * columns for rows, columns in SHAPES.values())
    subjects: dict[str, tuple[Measure, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows_of = Path(temporary), quantizer(args.llama_cpp)
        write_gguf(folder / "BF16.gguf", args.layers, rows_of, {}, "BF16")
        for kind in args.gguf:
            plan, file = planned_types(args.llama_cpp, folder / "BF16.gguf", kind), folder / f"{kind}.gguf"
            size = write_gguf(file, args.layers, rows_of, plan, kind)
            subjects[f"llama.cpp {kind}"] = measure_gguf(file, args), 8 * size / weights
        for name in args.forms:
            model = make_model(name, args.layers)
            tensors = [*model.model.layers.parameters(), *model.model.layers.buffers()]
            size = sum(tensor.nbytes for tensor in tensors)
            subjects[name] = measure_here(model, args), 8 * size / weights
        for threads in args.threads:
            results: dict[str, list[list[float]]] = {name: [] for name in subjects}
            for _ in range(args.rounds):
                for name, (measure, _) in subjects.items():
                    results[name].append(measure(threads))
            rows = []
            for name, rounds in results.items():
                medians = [statistics.median(values) for values in zip(*rounds)]
                rows.append([name, f"{subjects[name][1]:.2f}", *(f"{value:.1f}" for value in medians)])
            header = ["tokens per second", "bits per weight", *(f"{batch} sequences" for batch in args.batches)]
            print(
                f"\n{threads} threads\n\n{format_table([*header, f'prompt of {args.prompt_tokens}'], rows)}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="build llama.cpp from the package index")
    builder.add_argument("--folder", type=Path, required=True, help="to build in; kept")
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("--llama-cpp", type=Path, required=True, metavar="DIR", help="folder of llama.cpp's programs")
    runner.add_argument("--gguf", nargs="+", default=["Q4_0", "Q2_K"], metavar="TYPE", help="(default: Q4_0 Q2_K)")
    runner.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="(default: dense packed)")
    runner.add_argument("--layers", type=int, default=16, help="(default: 16)")
    runner.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="(default: 1 2)")
    runner.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8], help="(default: 1 4 8)")
    runner.add_argument("--prompt-tokens", type=int, default=512, help="(default: 512)")
    runner.add_argument("--new-tokens", type=int, default=16, help="of each sequence (default: 16)")
    runner.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    if args.command == "build":
        build(args.folder)
    else:
        run(args)


if __name__ == "__main__":
    main()
