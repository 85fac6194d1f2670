"""Keeps the zeros of a sparse model while transformers' `Trainer`, or a subclass, trains it."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from .keeping import SparsityKeeper, keep_sparsity
from .loading import load_stored_names
from .sparse_weights import unwrap


class SparsityCallback(TrainerCallback):
    """Callback that keeps every zero of a sparse model during training, and raises at the end if one was lost.

    Masks are made when training begins, from the checkpoint's weights if it resumes, and hold until it ends. If an error
    stops the training, gradients stay masked until the callback's next training. See [`keep_sparsity`] for adapters and for
    the errors.
    """

    keeper = SparsityKeeper([])  # of the last training; empty for a dense model

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if model is not None:
            load_stored_names(unwrap(model))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._check_loaded(model, state)
        self._keep(model)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.keeper.mask_gradients()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.keeper.apply(frozen=False)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.keeper.release()
        self.keeper.verify()

    def _check_loaded(self, model: nn.Module, state: Any) -> None:
        """Raise `ValueError` if training resumes and `Trainer` could not load all weights of the checkpoint."""
        model = unwrap(model)
        if load_stored_names(model) and state.global_step:
            raise ValueError(
                "Trainer did not load all weights of the checkpoint: it does not convert names, such as those of experts. "
                f"Pass the callback when you make the Trainer: Trainer(model, ..., callbacks=[{type(self).__name__}(...)])."
            )

    def _keep(self, model: nn.Module) -> None:
        """Keep the zeros that the model has now."""
        self.keeper.release()
        self.keeper = SparsityKeeper([])
        self.keeper = keep_sparsity(model)
        self.keeper.mask_from_now_on()
