"""Finds the pruned weights of a sparse model: its zeros, checked against its `sparsity_config` if it has one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import hf_private, peft
from ..model.change import PackedMask
from ..model.find_blocks import count_packed, find_all_projections
from ..model.projections import Block, Decoder, Projection
from ..model.sparsity import SPARSE, read_sparsity_config
from ..packed.packed_weight import INTEGERS


@dataclass(eq=False)
class SparseWeight:
    """A weight whose zeros are kept, of a projection or of all experts of a layer."""

    name: str  # in the model without adapters
    module: nn.Module
    parameter: str  # name in the module
    mask: PackedMask  # True where kept, for this process's part of the parameter

    @property
    def owner(self) -> nn.Parameter:
        """The parameter that holds the weight."""
        return getattr(self.module, self.parameter)

    @property
    def tensor(self) -> torch.Tensor:
        """This process's part of the weight. Raises `RuntimeError` if it no longer has the shape of the mask."""
        tensor = local_part(self.owner.detach())
        if tensor.shape != self.mask.shape:
            raise RuntimeError(f"{self.name} has another shape now: call keep_sparsity after accelerator.prepare.")
        return tensor

    @torch.no_grad()
    def apply_to(self, tensor: torch.Tensor) -> None:
        """Set a tensor of the weight's shape to zero where the weight is pruned, in place."""
        tensor = local_part(tensor)
        # Multiplying as integers turns NaN into 0.0 too, and is several times faster than `masked_fill_` on CPUs.
        tensor.view(INTEGERS[tensor.element_size()]).mul_(self._mask_on(tensor.device))

    def masked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor of the weight's shape that is zero where the weight is pruned, for autograd."""
        return tensor * self._mask_on(tensor.device).to(tensor.dtype)

    def _mask_on(self, device: torch.device) -> torch.Tensor:
        """Return the mask as booleans. Its bits move to the device once, when the model has moved there."""
        if self.mask.bits.device != device:
            self.mask = PackedMask(self.mask.bits.to(device), self.mask.shape)
        return self.mask.unpack()

    def count_pruned(self) -> int:
        """Return the number of pruned weights in this process's part."""
        return int((~self.mask.unpack()).sum())

    def count_lost(self) -> int:
        """Return the number of pruned weights that are not zero."""
        tensor = self.tensor
        return int(((tensor != 0) & ~self._mask_on(tensor.device)).sum())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True if every process holds a part of the tensor (FSDP2, tensor parallelism)."""
    return hasattr(tensor, "to_local")


def unwrap(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside DistributedDataParallel, torch.compile and PEFT's `PeftModel`."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return unwrap(model.module)
    if (inner := hf_private.uncompiled(model)) is not model:
        return unwrap(inner)
    model = peft.base_model(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"Expected a transformers PreTrainedModel, or PEFT's model of one, got {type(model).__name__}."
        )
    return model


def find_sparse_weights(model: nn.Module) -> list[SparseWeight]:
    """Return the weights of a sparse model with their masks: every zero in its projections is a pruned weight."""
    model = unwrap(model)
    decoder = find_sparse_decoder(model)
    weights = [weight for block in decoder.blocks for weight in _weights_of(block)]
    zeros = sum(
        int((weight.owner.detach() == 0).sum().full_tensor()) if is_sharded(weight.owner) else weight.count_pruned()
        for weight in weights
    )
    _check_zeros(zeros, sum(p.numel for p in decoder.projections.values()), read_sparsity_config(model.config))
    weights = [weight for weight in weights if weight.count_pruned()]
    copied = {part for module in peft.copied_modules(model).values() for part in module.modules()}
    if copies := [weight.name for weight in weights if weight.module in copied]:
        raise ValueError(
            f"PEFT trains a copy of {copies[0]} (modules_to_save), which loses its zeros: adapt it instead."
        )
    return weights


def find_sparse_decoder(model: PreTrainedModel) -> Decoder:
    """Return the decoder of a model without its adapters."""
    if count := count_packed(model):
        raise ValueError(f"The model holds {count} packed weights: call optimum_neuronal.densify(model) first.")
    with peft.without_adapters(model):
        return find_all_projections(model)


def _weights_of(block: Block) -> list[SparseWeight]:
    """Return the block's pruned weights; the experts of a layer are one weight."""
    owners: dict[tuple[nn.Module, str], list[Projection]] = {}
    for projection in block.pruned:
        owners.setdefault((projection.module, projection.parameter), []).append(projection)
    weights = []
    for (module, parameter), members in owners.items():
        name = members[0].name if members[0].expert is None else members[0].group
        owner = getattr(module, parameter)
        if owner.is_meta or not owner.is_floating_point():
            state = "not in memory" if owner.is_meta else f"of dtype {owner.dtype}"
            raise ValueError(f"The weights of {name} are {state}: load the model whole and without quantization.")
        weights.append(SparseWeight(name, module, parameter, PackedMask.pack(local_part(owner.detach()) != 0)))
    return weights


def _check_zeros(zeros: int, weights: int, recorded: Mapping[str, Any] | None) -> None:
    """Raise `ValueError` if the model is dense, or fewer weights are zero than pruning recorded."""
    if recorded is None and zeros <= SPARSE * weights:
        raise ValueError(
            f"The model is dense: only {zeros / weights:.2%} of the weights of its projections are zero. Prune it first."
        )
    kinds = (recorded or {}).get("projections", {}).values()
    expected = sum(round(kind["sparsity"] * (kind.get("numel") or 0)) for kind in kinds)
    if zeros < expected:
        raise ValueError(
            f"model.config.sparsity_config says that {expected:,} weights are zero, but {zeros:,} are: {expected - zeros:,} "
            "zeros were lost since, by training or merging. Load the pruned model again, or del "
            "model.config.sparsity_config to keep the present zeros."
        )
