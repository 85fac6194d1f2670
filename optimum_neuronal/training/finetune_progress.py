"""Shows how a fine-tune proceeds: a bar with the time left, and the perplexity on held-out text."""

import sys
import time
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from ..common.display import format_duration
from ..common.progress import announce
from ..evaluation.perplexity import as_perplexity


class FinetuneProgress(TrainerCallback):
    """A bar on a terminal; in a log, a line for each evaluation."""

    def __init__(self, shown: bool = True):
        self._shown, self._bar, self._loss = shown, None, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start, self._first = time.perf_counter(), state.global_step
        if self._shown and logging.is_progress_bar_enabled() and sys.stderr.isatty():
            self._bar = logging.tqdm(total=state.max_steps, initial=state.global_step, desc="fine-tuning", unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._loss = (logs or {}).get("loss", self._loss)
        if self._bar is not None and self._loss is not None:
            self._bar.set_postfix(loss=f"{self._loss:.3f}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if not self._shown or "eval_loss" not in (metrics or {}):
            return
        left = (state.max_steps - state.global_step) / max(1, state.global_step - self._first)
        seconds = left * (time.perf_counter() - self._start)
        perplexity = as_perplexity(metrics["eval_loss"])
        text = f"step {state.global_step} of {state.max_steps}: perplexity {perplexity:.2f} on held-out text"
        text += "" if self._loss is None else f", loss {self._loss:.3f}"
        text += f", {format_duration(seconds)} left" if seconds else ""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            announce(text)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
