"""Count and time what a pruning run does: block forwards, seconds by stage and in the solver.

    python -m benchmarks.prune_speed MODEL fast best wanda alps+neuronal [--sparsity 0.6] [--num-samples 128]

A method is a preset or a text of `real_model.py`, such as alps:iterations=60+uniform. MODEL is a folder or an id on the Hub.
Figures are those of the reports, but for the solver's seconds, which the standard library's profiler measures on the CPU.

The share of the peak is that of block forwards in the time outside the solver, without attention's products and a refit's
gradients, against a large product in float32 that is timed before each prune.
"""

import argparse
import cProfile
import pstats

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.real_model import make_config
from benchmarks.shared import peak_teraflops, share_of_peak
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.common.torch_state import default_device
from optimum_neuronal.config.presets import PRESETS
from optimum_neuronal.model.find_blocks import find_decoder


STAGES = ("calibration data", "allocation", "pruning")
SOLVER = ("changes", "zeros")  # methods of a saliency that make masks and weights, none within another
HEADER = (
    *("method", "block forwards", *(f"{stage}, s" for stage in STAGES)),
    *("solver, s", "all, s", "share of the peak"),
)
ROWS, REPEATS = 2048, 5  # of the large product


def method_config(method: str, sparsity: float, **fields) -> NeuronALConfig:
    """Return the config of a preset, with its own sparsity if it has one, or of a method's text."""
    if method not in PRESETS:
        return make_config(method, sparsity, **fields)
    if "sparsity" not in PRESETS[method]:
        fields["sparsity"] = sparsity
    return NeuronALConfig.preset(method, **fields)


def measure(method: str, args: argparse.Namespace) -> list[str]:
    """Prune a fresh model, and return a row of the table."""
    sizes = {name: getattr(args, name) for name in ("dataset", "num_samples", "seq_length", "num_alignment_samples")}
    config = method_config(method, args.sparsity, **sizes)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(default_device())
    decoder = find_decoder(model, config.targets, config.ignore)
    pruner, profile = NeuronALPruner(config, AutoTokenizer.from_pretrained(args.model)), cProfile.Profile()
    teraflops = peak_teraflops(ROWS, model.device, torch.float32, REPEATS)
    profile.runcall(pruner.prune, model)
    called, report = pstats.Stats(profile).stats, pruner.report  # (file, line, name) -> counts and seconds
    count = report.block_forwards
    times = [report.seconds.get(stage, 0) for stage in STAGES]
    solving = [entry[3] for (file, _, name), entry in called.items() if name in SOLVER and "saliency" in file]
    times += [sum(solving), sum(report.seconds.values())]
    outside = sum(times[1:3]) - times[3]
    share = share_of_peak(count, report.calibration.get("seq_length", 0), decoder.blocks[0].module, outside, teraflops)
    return [method, f"{count:,}", *(f"{seconds:.2f}" for seconds in times), f"{share:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("methods", nargs="+", help=f"texts, or presets: {', '.join(PRESETS)}")
    parser.add_argument("--sparsity", type=float, default=0.6, help="unless a preset has one (default: 0.6)")
    parser.add_argument("--dataset", default="c4", help="(default: c4)")
    parser.add_argument("--num-samples", type=int, default=128, help="(default: 128)")
    parser.add_argument("--seq-length", type=int, help="(default: 2048, or the model's longest sequence)")
    parser.add_argument("--num-alignment-samples", type=int, default=8, help="(default: 8)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    print(format_markdown(HEADER, [measure(method, args) for method in args.methods]))


if __name__ == "__main__":
    main()
