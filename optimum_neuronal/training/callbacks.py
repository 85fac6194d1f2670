"""Keeps the zeros of a sparse model while transformers' `Trainer`, or a class derived from it, trains the model.

```python
Trainer(model, arguments, train_dataset=data, callbacks=[SparsityCallback()]).train()
```
"""

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..common.display import format_html
from .keeping import SparsityKeeper, keep_sparsity
from .sparse_weights import unwrap


class Training:
    """One training of a `Trainer`, which calls no callback if an error or Ctrl-C ends it.

    So this looks for the Trainer's loop among the functions that the thread runs, by the `TrainerState` of the training.

    Args:
        state (`TrainerState`, *optional*): the state given to `on_train_begin`, in which this is made.
    """

    def __init__(self, state: TrainerState | None):
        self._state = None if state is None else weakref.ref(state)
        self._thread = threading.get_ident()
        self._loop = next((frame.f_code for frame in self._stack() if self._is_loop(frame)), None)

    def is_of(self, state: TrainerState) -> bool:
        """Return True if the state is this training's."""
        return self._state is not None and self._state() is state

    def is_under_way(self) -> bool:
        """Return False if the training has ended. True if no Trainer called the callback: then it is not known."""
        if self._loop is None:
            return True
        return any(frame.f_code is self._loop and self._is_loop(frame) for frame in self._stack())

    def _stack(self) -> Iterator[FrameType]:
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _is_loop(self, frame: FrameType) -> bool:
        if frame.f_code.co_varnames[:1] != ("self",):
            return False
        state = getattr(frame.f_locals.get("self"), "state", None)
        return state is not None and self.is_of(state)


class SparsityCallback(TrainerCallback):
    """Keeps every zero of a sparse model while it is trained, and raises at the end if one was lost.

    Masks are made when training begins, from the checkpoint's weights if it resumes, and hold until it ends, with an
    error or without. With a model that carries PEFT adapters, merging them keeps the zeros afterwards. One callback may
    serve several Trainers, also at the same time. See [`keep_sparsity`] for the errors.
    """

    def __init__(self) -> None:
        self._guarded: dict[nn.Module, tuple[SparsityKeeper, Training]] = {}  # by the unwrapped model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'; '.join(self._about())})"

    def _repr_html_(self) -> str:
        return f"<p>{type(self).__name__}</p>" + format_html(["what it does"], [[line] for line in self._about()])

    def _about(self) -> list[str]:
        """Return lines that say what the callback does."""
        kept = 0 if self.keeper is None else len(self.keeper.weights)
        return [f"keeps the zeros of {kept} weights" if kept else "keeps zeros"]

    @property
    def keeper(self) -> SparsityKeeper | None:
        """The keeper of the model whose training began last; None before, and for a dense model."""
        return next((keeper for keeper, _ in reversed(self._guarded.values())), None)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._keep(model, Training(state))

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        for keeper in self._keepers(model):
            keeper.mask_gradients()

    def on_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        for keeper in self._keepers(model):
            keeper.apply()

    def on_train_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        for keeper in self._keepers(model):
            keeper.release()
            keeper.verify()

    def _keepers(self, model: nn.Module | None) -> list[SparsityKeeper]:
        """Return the keeper of a model, if it is sparse and being trained; without a model all keepers."""
        if model is None:
            return [keeper for keeper, _ in self._guarded.values()]
        return [self._guarded[found][0]] if (found := unwrap(model)) in self._guarded else []

    def _keep(self, model: nn.Module, training: Training) -> SparsityKeeper:
        self._forget(model)
        keeper = keep_sparsity(model)
        keeper.mask_from_now_on(training.is_under_way)
        self._guarded[unwrap(model)] = keeper, training
        return keeper

    def _forget(self, model: nn.Module) -> None:
        """Release earlier masks of the model, and the masks of trainings that have ended, also with an error."""
        for other, (keeper, training) in list(self._guarded.items()):
            if other is unwrap(model) or not training.is_under_way():
                keeper.release()
                del self._guarded[other]
