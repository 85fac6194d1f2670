"""Keeps a sparse model sparse while it is trained: no pruned weight comes back, with any optimizer, in a loop or a `Trainer`.

The gradients of pruned weights are set to zero as soon as they are accumulated (under FSDP2 before the step), so
clipping (not under FSDP2), momentum and second moments see only the other weights. The pruned weights are set to zero
after every step, since some optimizers change weights whose gradients are zero.
"""

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import PreTrainedModel, TrainerCallback

from ..compat import hf_private
from .lora import guard_merging
from .sparse_weights import SparseWeight, find_sparse_weights, is_sharded, unwrap


_reading: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models that read the names of their checkpoints


class SparsityLostError(RuntimeError):
    """Pruned weights are no longer zero."""


def keep_sparsity(model: nn.Module) -> "SparsityKeeper":
    """Return a keeper of the zeros of a sparse model, for training.

    If the model has LoRA adapters, merging them keeps the zeros too. Other adapters (DoRA, LoHa, LoRA of experts) fill the
    zeros when they are merged: call the keeper's `apply()` after it.

    Args:
        model (`nn.Module`):
            A sparse model of transformers, or PEFT's model of one, in its final form for training: on its device, and
            wrapped by DistributedDataParallel, FSDP2 (`accelerator.prepare`) or torch.compile if it is to be.

    Returns:
        [`SparsityKeeper`]: a context manager around the training loop. Without `with`, call its `apply()` after every
            step of the optimizer and `verify()` at the end.

    Raises:
        `ValueError`, `TypeError`: a dense model, or one that has lost zeros or whose weights cannot be read (FSDP1,
            DeepSpeed's ZeRO-3, offloaded or quantized weights).
    """
    keeper = SparsityKeeper(find_sparse_weights(model))
    guard_merging(model, keeper.weights)
    return keeper


class SparsityKeeper(AbstractContextManager):
    """Keeper of zeros, made by [`keep_sparsity`]; its masks take one bit per weight.

    As a context manager it masks the gradients, sets pruned weights to zero after each step of a torch optimizer (or one
    wrapped by accelerate), and verifies at the end.
    """

    def __init__(self, weights: list[SparseWeight]):
        self.weights = weights
        self._handles: list = []

    @property
    def sparsity(self) -> float:
        """Share of zeros in the weights that this process holds, in (0, 1)."""
        return sum(weight.count_pruned() for weight in self.weights) / sum(w.tensor.numel() for w in self.weights)

    def apply(self) -> None:
        """Set the pruned weights to zero, after a step of an optimizer that is not torch's or after merging adapters."""
        for weight in self.weights:
            weight.apply_to(weight.tensor)

    def verify(self) -> None:
        """Raise [`SparsityLostError`] if a single pruned weight is not zero."""
        lost = {weight.name: count for weight in self.weights if (count := weight.count_lost())}
        if lost:
            worst = ", ".join(f"{name}: {count}" for name, count in list(lost.items())[:5])
            raise SparsityLostError(
                f"{sum(lost.values())} pruned weights are no longer zero ({worst}{', ...' if len(lost) > 5 else ''}). "
                "Something other than the optimizer changed them: apply() sets them to zero again."
            )

    def mask_from_now_on(self) -> None:
        """Mask the gradients of the trained weights as they are accumulated, until [`~SparsityKeeper.release`]."""
        for weight in self.weights:
            if weight.owner.requires_grad and not is_sharded(weight.owner):
                hook = weight.owner.register_post_accumulate_grad_hook(
                    lambda p, weight=weight: weight.apply_to(p.grad)
                )
                self._handles.append(hook)

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Set the gradients of pruned weights to zero under FSDP2, where they cannot be masked as they are accumulated."""
        for weight in self._trained_by(optimizer):
            if weight.owner.grad is not None and is_sharded(weight.owner.grad):
                weight.apply_to(weight.owner.grad)

    def after_step(self, optimizer: Optimizer | None = None) -> None:
        """Set the pruned weights that are trained, or only those of an optimizer, to zero: autograd may still need others."""
        for weight in self._trained_by(optimizer):
            if weight.owner.requires_grad:
                weight.apply_to(weight.tensor)

    def _trained_by(self, optimizer: Optimizer | None) -> list[SparseWeight]:
        if optimizer is None:
            return self.weights
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [weight for weight in self.weights if id(weight.owner) in trained]

    def release(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "SparsityKeeper":
        self.mask_from_now_on()
        self._handles.append(register_optimizer_step_pre_hook(lambda optimizer, *_: self.before_step(optimizer)))
        self._handles.append(register_optimizer_step_post_hook(lambda optimizer, *_: self.after_step(optimizer)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release()
        if kind is None:
            self.verify()


class SparsityCallback(TrainerCallback):
    """Callback that keeps every zero of a sparse model during training, and raises at the end if one was lost.

    Masks are made when training begins, from the checkpoint's weights if it resumes, and hold until it ends. If an error
    stops the training, gradients stay masked until the callback's next training. See [`keep_sparsity`] for adapters and for
    the errors.
    """

    keeper = SparsityKeeper([])  # of the last training; empty for a dense model

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if model is not None:
            read_stored_names(unwrap(model))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._check_loaded(model, state)
        self._keep(model)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.keeper.before_step()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.keeper.after_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.keeper.release()
        self.keeper.verify()

    def _check_loaded(self, model: nn.Module, state: Any) -> None:
        """Raise `ValueError` if training resumes and `Trainer` could not load all weights of the checkpoint."""
        if read_stored_names(unwrap(model)) and state.global_step:
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


def read_stored_names(model: PreTrainedModel) -> bool:
    """Let `load_state_dict`, with which `Trainer` reads its checkpoints, read the names that transformers saves.

    Return False if that changes nothing. transformers converts the weights of some families when it saves and loads: experts
    of MoE layers are stored one by one, and stacked in the model. `Trainer` does not convert them.
    """
    if model in _reading or hasattr(model, "peft_config") or not _only_stored(model):  # adapters alone are saved
        return False
    model.register_load_state_dict_pre_hook(_convert)
    _reading.add(model)
    return True


def _only_stored(model: PreTrainedModel) -> set[str]:
    """Return the names in a model's checkpoints that its state dict does not have."""
    state = model.state_dict()
    stand_ins = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    return hf_private.as_stored(model, stand_ins).keys() - state.keys()


def _convert(model: PreTrainedModel, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace the tensors of a state dict that have names of a checkpoint with the model's, in place."""
    given = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if _only_stored(model).isdisjoint(given):
        return
    for name in given:
        del state[prefix + name]
    loaded = hf_private.as_loaded(model, given, model.state_dict())
    state.update({prefix + name: tensor for name, tensor in loaded})
