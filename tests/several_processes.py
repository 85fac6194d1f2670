"""Runs a test's function in several processes that know of each other."""

import multiprocessing
import os

from torch import distributed


def _run(work, rank, count, rendezvous, *args):
    os.environ |= {  # as `accelerate launch` sets them; nobody looks for the port
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count)
    work(rank, count, *args)
    distributed.destroy_process_group()


def in_processes(count, work, folder, *args):
    """Runs `work(rank, count, *args)` in so many processes; all must end well."""
    context, rendezvous = multiprocessing.get_context("fork"), folder / f"rendezvous{count}"
    processes = [context.Process(target=_run, args=(work, rank, count, rendezvous, *args)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * count
