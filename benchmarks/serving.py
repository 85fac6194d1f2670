"""Compare a dense and a packed model of the same shapes behind vLLM's HTTP server: speed and memory.

    .venv-vllm/bin/python -m benchmarks.serving [--layers 4] [--rounds 3]

A random Llama with the shapes of Llama-3.2-1B and 70% zeros is served dense by vLLM alone and packed by the plug-in, at the
same time. Requests go to the two alternately, so that other load slows both. Memory is that of the server's largest process,
minus that with a model of hardly any weights. `make test-vllm` creates the environment.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.shared import resident, zero_randomly
from benchmarks.vllm_server import Server, serving
from optimum_neuronal import save_pretrained
from optimum_neuronal.common.display import format_table


SHAPES = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
VOCABULARY, LONGEST = 32000, 1024
OPTIONS = (
    "--dtype",
    "bfloat16",
    "--max-model-len",
    str(LONGEST),
    "--skip-tokenizer-init",
    "--no-enable-prefix-caching",
)
# Name -> requests at once, tokens of a prompt, tokens that are generated, requests of each in a round.
LOADS = {"1": (1, 8, 32, 2), "4": (4, 8, 32, 1), "8": (8, 8, 32, 1), "32": (32, 8, 32, 1), "prompt": (1, 512, 1, 2)}


def make_model(layers: int, **shapes: int) -> LlamaForCausalLM:
    """Return a random model in bfloat16 with 70% zeros in its projections."""
    config = LlamaConfig(
        num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=LONGEST, tie_word_embeddings=True,
        dtype="bfloat16", **shapes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16().eval()
    zero_randomly(model, 0.7)
    return model


def save_models(folder: Path, layers: int) -> None:
    """Save a dense and a packed model, and one of hardly any weights."""
    model = make_model(layers, **SHAPES)
    save_pretrained(model, folder / "dense")
    save_pretrained(model, folder / "packed", format="packed")
    save_pretrained(make_model(1, hidden_size=64, intermediate_size=64, num_attention_heads=2), folder / "nothing")
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    for name in ("dense", "packed", "nothing"):
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / name)


def measure(server: Server, count: int, length: int, tokens: int, repeats: int) -> tuple[float, float]:
    """Return requests per second and seconds for each generated token, of requests that are sent `count` at once."""

    def ask(number: int) -> list[float]:
        taken = []
        for _ in range(repeats):
            prompt = torch.randint(5, VOCABULARY, (length,)).tolist()
            start = time.perf_counter()
            _, generated = server.complete(prompt, tokens)
            taken.append((time.perf_counter() - start) / len(generated))
        return taken

    start = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        taken = [seconds for several in pool.map(ask, range(count)) for seconds in several]
    return count * repeats / (time.perf_counter() - start), statistics.median(taken)


def peak(pid: int) -> int:
    """Return the bytes of the largest resident memory of the largest of a process and those that it started."""
    return max(resident("VmHWM", process) for process in tree(pid))


def tree(pid: int) -> Iterator[int]:
    """Yield a process and all that it started."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from tree(int(child))


def weights_size(folder: Path) -> int:
    """Return the bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="decoder blocks (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="of each load (default: 3)")
    parser.add_argument("--eager", action="store_true", help="without graphs of Inductor")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    more = ("--enforce-eager",) if args.eager else ()
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder, load = Path(name), {"dense": (), "packed": ("--load-format", "optimum_neuronal")}
        save_models(folder, args.layers)
        with serving(folder / "nothing", folder / "log", *OPTIONS, *more) as server:
            server.complete([5], 2)
            nothing = peak(server.pid)
        started = {
            kind: servers.enter_context(serving(folder / kind, folder / f"{kind}.log", *OPTIONS, *options, *more))
            for kind, options in load.items()
        }
        memory = []
        for kind, server in started.items():
            above, size = peak(server.pid) - nothing, weights_size(folder / kind)
            memory.append([kind, f"{size / 1e6:.0f}", f"{above / 1e6:.0f}", f"{above / size:.2f}"])
        print(format_table(["model", "weights, MB", "peak above vLLM's own, MB", "ratio"], memory), flush=True)
        compare(started, args.rounds)


def compare(started: dict[str, Server], rounds: int) -> None:
    """Send each load to each server alternately, and print the best of all rounds and the median ratio."""
    rows = []
    for load, sizes in LOADS.items():
        results = {kind: [] for kind in started}
        for number in range(rounds + 1):  # the first warms up
            for kind, server in started.items():
                result = measure(server, *sizes)
                if number:
                    results[kind].append(result)
        ratios = [packed[0] / dense[0] for dense, packed in zip(results["dense"], results["packed"])]
        figures = [f"{max(rate for rate, _ in results[kind]):.3g}" for kind in started]
        figures += [f"{1000 * min(seconds for _, seconds in results[kind]):.3g}" for kind in started]
        rows.append([load, *figures, f"{statistics.median(ratios):.2f}"])
        print(rows[-1], flush=True)
    columns = ["requests at once", "dense, 1/s", "packed, 1/s", "dense, ms a token", "packed, ms a token", "faster"]
    print(format_table(columns, rows))


if __name__ == "__main__":
    main()
