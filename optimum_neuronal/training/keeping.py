"""Keeps a sparse model sparse while it is trained: no pruned weight comes back, with any optimizer and loop.

The gradients of pruned weights are set to zero as soon as they are accumulated (under FSDP2 before the step), so
clipping (not under FSDP2), momentum and second moments see only the other weights. The pruned weights are set to zero
after every step, since some optimizers change weights whose gradients are zero.
"""

from contextlib import AbstractContextManager

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .lora import guard_merging
from .sparse_weights import SparseWeight, find_sparse_weights, is_sharded


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

    def apply(self, optimizer: Optimizer | None = None, frozen: bool = True) -> None:
        """Set the pruned weights to zero. Call it after each step of an optimizer that is not torch's.

        Args:
            optimizer (`torch.optim.Optimizer`, *optional*): change only its weights; autograd may still need others.
            frozen (`bool`): change weights with `requires_grad=False` too, as merged adapters do.
        """
        for weight in self._trained_by(optimizer):
            if frozen or weight.owner.requires_grad:
                weight.apply_to(weight.tensor)

    def mask_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Set the gradients of pruned weights to zero under FSDP2, where they cannot be masked as they are accumulated."""
        for weight in self._trained_by(optimizer):
            if weight.owner.grad is not None and is_sharded(weight.owner.grad):
                weight.apply_to(weight.owner.grad)

    def _trained_by(self, optimizer: Optimizer | None) -> list[SparseWeight]:
        if optimizer is None:
            return self.weights
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [weight for weight in self.weights if id(weight.owner) in trained]

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

    def release(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "SparsityKeeper":
        self.mask_from_now_on()
        self._handles.append(register_optimizer_step_pre_hook(lambda optimizer, *_: self.mask_gradients(optimizer)))
        self._handles.append(register_optimizer_step_post_hook(lambda optimizer, *_: self.apply(optimizer)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release()
        if kind is None:
            self.verify()
