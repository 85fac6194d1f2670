"""The checkpoints of a fine-tune: the last and the best one. A marker, written last and removed first, says which are whole."""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerState

from ..common.notes import announce, get_logger
from ..common.processes import Processes
from ..evaluation.perplexity import as_perplexity
from ..files.output import write_atomically


logger = get_logger(__name__)

MARKER = "complete.json"  # the checksums of all other files


class Checkpoints(TrainerCallback):
    """Keeps the last and the best checkpoint in a folder, and shows the perplexity on held-out text.

    A checkpoint is the best one only if it measures better than the untrained weights, step 0.
    """

    def __init__(self, folder: Path, processes: Processes):
        self.folder, self.processes = folder, processes

    def path(self, step: int | None) -> Path:
        return self.folder / f"checkpoint-{step}"

    def find_last(self) -> TrainerState | None:
        """Return the state of the last checkpoint that is whole, as is the best one by then. Remove all others."""
        last = None
        if self.processes.rank == 0:
            whole = {}
            for path in self.folder.glob("checkpoint-*"):
                if (path / MARKER).is_file() and (path / MARKER).read_bytes() == _checksums(path):
                    state = TrainerState.load_from_json(str(path / "trainer_state.json"))
                    whole[state.global_step] = state
                else:
                    logger.warning(f"{path} is incomplete or damaged: it is skipped.")
            usable = [step for step, state in whole.items() if state.best_global_step in (0, *whole)]
            last = whole[max(usable)] if usable else None
            self._remove_all_but(last)
        return self.processes.from_first(last)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            state.best_metric, state.best_global_step = metrics["eval_loss"], 0
        if self.processes.rank == 0:
            perplexity = as_perplexity(metrics["eval_loss"])
            announce(f"step {state.global_step} of {state.max_steps}: perplexity {perplexity:.2f} on held-out text")

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.processes.collect([])  # each process has written its random state
        if self.processes.rank == 0:
            path = self.path(state.global_step)
            write_atomically(path / MARKER, _checksums(path))
            self._remove_all_but(state)

    def _remove_all_but(self, state: TrainerState | None) -> None:
        """Remove all checkpoints but that of a state and the best one by then."""
        kept = [self.path(step) for step in (state.global_step, state.best_global_step)] if state else []
        for path in filter(Path.is_dir, self.folder.glob("checkpoint-*")):
            if path not in kept:
                (path / MARKER).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)


def _checksums(checkpoint: Path) -> bytes:
    """Return the checksum of each file by its path, which begins with the checkpoint's name, as JSON."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MARKER)
    sums = [
        path.stat().st_size and zlib.crc32(np.memmap(path, mode="r")) for path in files
    ]  # an empty file has no map
    names = [path.relative_to(checkpoint.parent).as_posix() for path in files]
    return json.dumps(dict(zip(names, sums))).encode()
