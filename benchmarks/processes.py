"""Measure the time of a pruning run shared by several processes.

    python -m benchmarks.processes [--counts 1 2] [--samples 64]

Every process has one thread, so two processes have twice the cores of one. The reference model is pruned with Wanda and
both steps of NeuronAL, and the weights of all runs are compared.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers.utils import logging

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.display import format_table
from tests import authors


def run(rank: int, count: int, folder: Path, samples: int) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    store = f"file://{folder}/rendezvous{count}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    model, ids = authors.load_model(), authors.load_ids("calibration_ids")[:samples]
    pruner = NeuronALPruner(
        NeuronALConfig(0.7, "wanda", topup="neuronal", topup_args={"steps": "both"}, num_samples=samples)
    )
    distributed.barrier()
    start = time.perf_counter()
    pruner.prune(model, ids)
    seconds = time.perf_counter() - start
    if rank == 0:
        state = {key: value.contiguous().clone() for key, value in model.state_dict().items()}
        phases = {**pruner.report.seconds, "all": seconds}
        save_file(state, folder / f"{count}.safetensors")
        (folder / f"{count}.json").write_text(json.dumps(phases))
    distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2], help="processes (default: 1 2)")
    parser.add_argument("--samples", type=int, default=64, help="calibration sequences (default: 64)")
    args = parser.parse_args()
    context, rows = multiprocessing.get_context("fork"), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in args.counts:
            processes = [
                context.Process(target=run, args=(rank, count, folder, args.samples)) for rank in range(count)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        results = {count: json.loads((folder / f"{count}.json").read_text()) for count in args.counts}
        states = [load_file(folder / f"{count}.safetensors") for count in args.counts]
        equal = all(torch.equal(value, other[key]) for other in states for key, value in states[0].items())
    for count, phases in results.items():
        first = results[args.counts[0]]
        shares = [f"{first[phase] / phases[phase]:.2f}" for phase in ("allocation", "pruning", "all")]
        rows.append([count, f"{phases['all']:.1f}", *shares])
    header = ["processes", "seconds", "times faster: search", "final pruning", "all"]
    print(format_table(header, rows))
    print(f"The weights of all runs are {'equal' if equal else 'DIFFERENT'}.")


if __name__ == "__main__":
    main()
