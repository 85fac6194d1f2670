"""Compare packed models with llama.cpp's on the same machine, in one run and in turns.

    pip install -e ".[benchmarks-llama]"
    python -m benchmarks.against_llama_cpp build --folder DIR
    python -m benchmarks.against_llama_cpp run --llama-cpp DIR/llama_cpp_python-0.3.36/vendor/llama.cpp/build/bin

`build` compiles llama.cpp for this processor from the sdist of llama-cpp-python, which takes ten minutes or more; it
needs a C++ compiler. With GCC 12 llama.cpp's AMX kernels crash, so `build` puts a compiler barrier before the
instruction that loads the tile configuration. Who names an own build for a processor with AMX should do the same, or
take another compiler. `run` needs llama-bench, llama-batched-bench, llama-quantize and libggml-base in one folder.

All models have the shapes of Llama-3.2-1B with random weights, on which speed does not depend, and a vocabulary of 512:
so decoding is little else than the projections' products. `--vocabulary 128256` gives them a real head, which
llama.cpp quantises and the packed models here do not. `--layers 4` takes a quarter of the time: "ms a layer" is a
token's time, with all that is no layer, divided by the layers. Bytes are those of the projections in the file, although
llama.cpp repacks some types while loading. "Projections" is the time of the
packed projections alone, which llama.cpp's programs do not tell. Ratios are medians of the rounds' ratios to the first
GGUF type. They are left out if other processes take more than half a core, unless `--despite-load` is given.

`--cpu-time` is for a machine on which others compute: it counts processor time instead, of one sequence on one thread.
Others' share of caches and of bandwidth is still in it. Of llama.cpp it takes the difference of two runs of llama-bench,
which differ in the number of tokens.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers.utils import logging

from benchmarks.llama_cpp_build import build
from benchmarks.llama_cpp_subjects import (
    PROJECTIONS,
    SINGLE,
    Rates,
    Subject,
    Work,
    gguf_cpu_subject,
    gguf_subject,
    packed_cpu_subject,
    packed_subject,
)
from benchmarks.other_load import OtherLoad
from benchmarks.same_shapes import PACKED, Shape, make_model, projection_bytes
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.packed.environment import describe_environment


GGUF = ("Q4_0", "Q2_K", "Q8_0", "IQ2_XS")
BUSY = 0.5  # cores of other processes above which ratios say nothing


def measure_in_turns(
    subjects: Mapping[str, Subject], threads: Sequence[int], rounds: int
) -> dict[int, dict[str, list[Rates]]]:
    """Rates of every subject by round, for each number of threads."""
    found: dict[int, dict[str, list[Rates]]] = {count: {name: [] for name in subjects} for count in threads}
    for number in range(rounds):
        for count in threads:
            for name, measure in subjects.items():
                found[count][name].append(measure(count))
                print(f"round {number + 1}, {count} threads, {name}", flush=True)
    return found


def table(
    works: Sequence[str],
    rates: Mapping[str, list[Rates]],
    sizes: Mapping[str, int],
    layers: int,
    weights: int,
    base: str | None,
) -> str:
    """A table in Markdown: a row for each model.

    Args:
        works: kinds of work, in the order of the columns.
        rates: name -> rates by round.
        sizes: name -> bytes of the projections.
        layers, weights: number of layers, and of the projections' weights in all.
        base: the model whose rates the ratios are to; None leaves the ratios out.
    """
    header = ["model", "MB", "bits per weight"]
    for work in works:
        header += [work] + ["times"] * (base is not None)
    header += ["ms a layer", "projections, ms"]
    rows = []
    for name, rounds in rates.items():
        row = [name, f"{sizes[name] / 1e6:.1f}", f"{sizes[name] * 8 / weights:.2f}"]
        medians = {work: statistics.median(one[work] for one in rounds) for work in rounds[0]}
        for work in works:
            row.append(f"{medians[work]:.1f}")
            if base is not None:
                ratios = [one[work] / other[work] for one, other in zip(rounds, rates[base])]
                row.append(f"{statistics.median(ratios):.2f}")
        row.append(f"{1e3 / medians[SINGLE] / layers:.2f}" if SINGLE in medians else "")
        row.append(f"{1e3 / medians[PROJECTIONS]:.2f}" if PROJECTIONS in medians else "")
        rows.append(row)
    return format_markdown(header, rows)


def base_of(names: Sequence[str], others: float | None, despite_load: bool) -> str | None:
    """The model that ratios are to, or None and a warning if other processes took too much; `others` is in cores."""
    if others is None or others > BUSY:
        taken = "an unknown share" if others is None else f"{others:.1f} cores"
        left_out = "" if despite_load else "; ratios are left out"
        print(f"\nWARNING: other processes took {taken} meanwhile: measure again on an idle machine{left_out}.")
        return names[0] if despite_load else None
    return names[0]


def run(args: argparse.Namespace) -> None:
    """Makes the models, measures and prints tables."""
    from benchmarks.gguf_models import write_models  # needs the package gguf

    shape, builds = Shape(args.layers, args.vocabulary), set[str]()
    work = Work(args.batches, args.prompt_tokens, args.new_tokens, args.llama_cpp, builds)
    of_packed, of_gguf = (packed_cpu_subject, gguf_cpu_subject) if args.cpu_time else (packed_subject, gguf_subject)
    with tempfile.TemporaryDirectory() as temporary:
        files = write_models(args.files or Path(temporary), shape, args.gguf, args.llama_cpp)
        subjects, sizes = {}, {}
        for kind, (file, size) in files.items():
            subjects[f"llama.cpp {kind}"], sizes[f"llama.cpp {kind}"] = of_gguf(file, work), size
        for kind in args.packed:
            model = make_model(kind, shape)
            subjects[kind], sizes[kind] = of_packed(model, work), projection_bytes(model)
        load = OtherLoad()
        found = measure_in_turns(subjects, [1] if args.cpu_time else args.threads, args.rounds)
        others = load.cores()
    here = describe_environment()
    print(f"\n{here['processor']}, {args.layers} layers, vocabulary {args.vocabulary}, {args.rounds} rounds; "
          f"optimum_neuronal {here['optimum_neuronal']}, kernels {here['kernel in use']}, torch {here['torch']}, "
          f"llama.cpp {' '.join(sorted(builds))}. Tokens per second{' of processor time' * args.cpu_time}.")  # fmt: skip
    base = base_of(list(subjects), others, args.despite_load or args.cpu_time)
    works = [SINGLE] if args.cpu_time else work.names
    for threads, rates in found.items():
        print(f"\n{threads} thread{'s' * (threads > 1)}\n")
        print(table(works, rates, sizes, args.layers, shape.weights, base), flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="build llama.cpp from the package index")
    builder.add_argument("--folder", type=Path, required=True, help="to build in; kept")
    builder.add_argument("--jobs", type=int, default=2, help="compilers at a time (default: 2)")
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("--llama-cpp", type=Path, required=True, metavar="DIR", help="folder of llama.cpp's programs")
    runner.add_argument("--files", type=Path, help="folder for GGUF files, kept (default: a temporary one)")
    runner.add_argument("--gguf", nargs="+", default=GGUF, metavar="TYPE", help=f"(default: {' '.join(GGUF)})")
    runner.add_argument("--packed", nargs="+", choices=PACKED, default=list(PACKED), help="(default: all)")
    runner.add_argument("--layers", type=int, default=16, help="(default: 16)")
    runner.add_argument("--vocabulary", type=int, default=512, help="(default: 512)")
    runner.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="(default: 1 2)")
    runner.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8], help="(default: 1 4 8)")
    runner.add_argument("--prompt-tokens", type=int, default=512, help="(default: 512)")
    runner.add_argument("--new-tokens", type=int, default=16, help="of each sequence (default: 16)")
    runner.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    runner.add_argument("--despite-load", action="store_true", help="print ratios although other processes compute")
    runner.add_argument("--cpu-time", action="store_true", help="count processor time; one sequence, one thread")
    return parser.parse_args()


def main():
    args = parse()
    if args.command == "build":
        print(f"--llama-cpp {build(args.folder, args.jobs)}")
        return
    logging.disable_progress_bar()
    run(args)


if __name__ == "__main__":
    main()
