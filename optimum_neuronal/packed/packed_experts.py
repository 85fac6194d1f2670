"""Experts of MoE layers with packed weights, computed through transformers' registry of experts functions.

Each stacked parameter of an experts module becomes a [`PackedStack`], and the module gets a config of its own, which names
the function below. Other modules keep the model's config.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..compat import hf_private
from .grouped_weight import MAX_FUSED_ROWS, GroupedWeight, find_kernels
from .ops import row_count, sparse_linear, weight_of
from .packed_module import PackedModule
from .packed_weight import PackedWeight
from .sparse_matrix import SparseMatrix


FUNCTION = "optimum_neuronal_packed"  # name in the registry
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")  # of an experts module, in all families


class PackedStack(PackedModule):
    """The weights of all experts of a layer: one matrix, shape (experts * out, in)."""

    suffix = ""

    def __init__(self, matrix: PackedWeight, experts: int, transposed: bool, dense_config: PreTrainedConfig | None):
        super().__init__(matrix, (experts, matrix.row_count // experts, matrix.shape[-1]), transposed)
        self.experts = experts
        self.dense_config = dense_config  # of the experts module before, for `take_packed`

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Multiply each row of x (rows, in) with its expert's weight: (rows, out). `chosen` (rows,) ascends."""
        x = x.to(self.dtype)
        if torch.compiler.is_compiling():  # into an operation without a backward
            return packed_experts(x, chosen, self.tensors(), self.experts)
        return _by_expert(self.matrix, x, chosen, self.experts, self.passes_gradients)


@torch.library.custom_op("optimum_neuronal::packed_experts", mutates_args=())
def packed_experts(
    x: torch.Tensor, chosen: torch.Tensor, weight: Sequence[torch.Tensor], experts: int
) -> torch.Tensor:
    """Compute [`PackedStack.forward`] as one operation, so that graphs of torch.compile don't depend on the routing."""
    return _by_expert(weight_of(weight, x.shape[1]), x, chosen, experts)


@packed_experts.register_fake
def _(x, chosen, weight, experts):
    return x.new_empty(x.shape[0], row_count(weight) // experts)


def _by_expert(
    stack: SparseMatrix, x: torch.Tensor, chosen: torch.Tensor, experts: int, passes_gradients: bool = False
) -> torch.Tensor:
    out = stack.row_count // experts
    is_differentiated = torch.is_grad_enabled() and x.requires_grad
    if isinstance(stack, GroupedWeight) and len(x) <= MAX_FUSED_ROWS * experts and not is_differentiated:
        # A kernel reads which expert a row has: below, the host waits for the device to count them.
        return find_kernels(x.device).multiply_experts(stack, x.contiguous(), chosen, experts)
    output, start = x.new_zeros(len(x), out), 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=experts)[:experts].tolist()):
        if count:
            weight = stack.window(expert * out, (expert + 1) * out)
            output[start : start + count] = sparse_linear(weight, x[start : start + count], None, passes_gradients)
            start += count
    return output


def packed_forward(
    experts: nn.Module, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute an experts module, hidden (tokens, size), for the k experts of each token and their weights, (tokens, k)."""
    names = stack_names(experts)
    if not isinstance(getattr(experts, names[0]), PackedStack):
        return hf_private.own_experts_forward(experts)(experts, hidden, indices, weights)
    (tokens, count), dtype = indices.shape, hidden.dtype
    chosen, order = indices.flatten().sort(stable=True)

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        output, bias = getattr(experts, name)(x, chosen), hf_private.expert_bias(experts, name, chosen)
        return output if bias is None else output + bias

    first = project(names[0], hidden[order // count])
    middle = hf_private.activate(experts, first, gated=names[0] == "gate_up_proj")
    output = hf_private.finish(experts, project(names[1], middle))
    output = (output * weights.flatten()[order, None])[order.argsort()]
    return output.view(tokens, count, -1).sum(dim=1).to(dtype)


ALL_EXPERTS_FUNCTIONS.register(FUNCTION, packed_forward)


def stack_names(experts: nn.Module) -> list[str]:
    """Return the names of the two weights of an experts module, in the order in which they are applied."""
    return [name for name in PARAMETERS if getattr(experts, name, None) is not None]


def is_packable(module: nn.Module) -> bool:
    """Return True if a module holds stacked experts that can be computed packed."""
    if not hf_private.chooses_experts_function(module):
        return False
    names = stack_names(module)
    weights = [getattr(module, name) for name in names]
    return len(names) == 2 and all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights)
