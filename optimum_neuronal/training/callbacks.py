"""Keeps the zeros of a sparse model while transformers' `Trainer`, or a subclass, trains it."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from .keeping import SparsityKeeper, keep_sparsity


class SparsityCallback(TrainerCallback):
    """Callback that keeps every zero of a sparse model during training, and raises at the end if one was lost.

    Masks are made when training begins, from the checkpoint's weights if it resumes, and hold until it ends. If an error
    stops the training, gradients stay masked until the callback's next training. See [`keep_sparsity`] for adapters and for
    the errors.
    """

    keeper = SparsityKeeper([])  # of the last training; without weights for a dense model

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._keep(model)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.keeper.mask_gradients()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.keeper.apply(frozen=False)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.keeper.release()
        self.keeper.verify()

    def _keep(self, model: nn.Module) -> None:
        """Keep the model's present zeros from now on."""
        self.keeper.release()
        self.keeper = SparsityKeeper([])
        self.keeper = keep_sparsity(model)
        self.keeper.mask_from_now_on()
