"""Mixtures of experts whose weights are packed, computed through transformers' registry of experts functions.

A mixture keeps its class. Each of its stacked parameters, shape (experts, ., .), becomes a [`PackedStack`] of the same
name, and its config names the function below, which reads the packed bytes of the experts that tokens are sent to and
of no others.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..compat import hf_private
from .formats.packed_matrix import PackedMatrix
from .inference_only import ADVICE, mark, watched
from .ops import linear, matrix_of, product
from .packed_module import PackedBuffers


FUNCTION = "optimum_neuronal_packed"  # name in the registry
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")  # of a mixture, as all families call them


class PackedStack(PackedBuffers):
    """The weights of all experts of a layer, one after the other in the same buffers.

    Args:
        matrix ([`PackedMatrix`]): of all experts, shape (experts * out, in).
        experts (`int`): how many.
        transposed (`bool`): whether the dense parameter has the shape (experts, in, out).
        function (`str`, *optional*): what computed the mixture before, by its name in the registry; None if not known.
    """

    suffix = ""

    def __init__(self, matrix: PackedMatrix, experts: int, transposed: bool, function: str | None):
        super().__init__(matrix, transposed)
        self.experts, self.function = experts, function

    @property
    def out_features(self) -> int:
        """Number of rows of one expert's weight."""
        return self.row_count // self.experts

    @property
    def dense_shape(self) -> tuple[int, int, int]:
        out, columns = self.out_features, self.columns
        return (self.experts, columns, out) if self.transposed else (self.experts, out, columns)

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense parameter."""
        return torch.Size(self.dense_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.held.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.held.device

    def __getitem__(self, index):
        raise TypeError(
            "The experts' weights are packed, and the function that is to compute them takes dense ones: "
            f"model.set_experts_implementation({FUNCTION!r}), or {ADVICE}."
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return each row of x times the transposed weight of its expert.

        Args:
            x (`Tensor`): shape (rows, in), sorted by expert.
            chosen (`Tensor` of int64): shape (rows,), the experts' numbers, rising; at numbers that no expert has,
                the result is 0.

        Returns:
            `Tensor`: shape (rows, out), of the weights' dtype.

        Raises:
            `RuntimeError`: in training mode, if gradients are wanted and there are no adapters; else a backward raises it.
        """
        compiling = torch.compiler.is_compiling()  # into an operation that passes no gradients
        # Of the second weight gradients are wanted also by biases of the first.
        inner = x.detach() if watched(self, x) or compiling and x.requires_grad else x
        if compiling:
            tensors = self._graph_tensors()
            output = packed_experts(inner.to(self.dtype), chosen, self.format, tensors, self.row_count, self.experts)
        else:
            output = _by_expert(self.matrix, inner.to(self.dtype), chosen, self.experts, product)
        return output if inner is x else mark(output, x)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, out_features={self.out_features}, in_features={self.columns}, {super().extra_repr()}"


@torch.library.custom_op("optimum_neuronal::packed_experts", mutates_args=())
def packed_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    format: str,
    tensors: Sequence[torch.Tensor],
    rows: int,
    experts: int,
) -> torch.Tensor:
    """[`PackedStack.forward`] as one operation, in which graphs of torch.compile need not look at the choice."""
    return _by_expert(matrix_of(format, tensors, rows, x.shape[1], x.dtype), x, chosen, experts)


@packed_experts.register_fake
def _(x, chosen, format, tensors, rows, experts):
    return x.new_empty(x.shape[0], rows // experts)


def _by_expert(
    stack: PackedMatrix, x: torch.Tensor, chosen: torch.Tensor, experts: int, compute: Callable = linear
) -> torch.Tensor:
    out = stack.row_count // experts
    output = x.new_zeros(len(x), out)
    start = 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=experts)[:experts].tolist()):
        if count:
            part = stack.window(expert * out, (expert + 1) * out)
            output[start : start + count] = compute(part, x[start : start + count])
            start += count
    return output


def packed_forward(
    experts: nn.Module, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute a mixture, for the registry.

    Args:
        experts (`nn.Module`): the mixture; one that is not packed computes as it would have by itself.
        hidden (`Tensor`): shape (tokens, hidden size).
        indices, weights (`Tensor`): shape (tokens, k): the experts of every token, and how much each counts.

    Returns:
        `Tensor`: shape (tokens, hidden size).
    """
    names = stack_names(experts)
    if not isinstance(getattr(experts, names[0]), PackedStack):
        return hf_private.own_experts_forward(experts)(hidden, indices, weights)
    inner = hidden.detach() if watched(getattr(experts, names[0]), hidden) else hidden
    (tokens, count), dtype = indices.shape, hidden.dtype
    chosen, order = indices.flatten().sort(stable=True)
    first = _project(experts, names[0], inner[order // count], chosen)
    middle = hf_private.activate(experts, first, gated=names[0] == "gate_up_proj")
    output = hf_private.finish(experts, _project(experts, names[1], middle, chosen))
    output = (output * weights.flatten()[order, None])[order.argsort()]
    output = output.view(tokens, count, -1).sum(dim=1).to(dtype)
    return output if inner is hidden else mark(output, hidden)


hf_private.register_experts_function(FUNCTION, packed_forward)


def _project(experts: nn.Module, name: str, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    output = getattr(experts, name)(x, chosen)
    bias = hf_private.expert_bias(experts, name, chosen)
    return output if bias is None else output + bias


def stack_names(experts: nn.Module) -> list[str]:
    """Return the names of a mixture's two weights, the one that its input meets first."""
    return [name for name in PARAMETERS if getattr(experts, name, None) is not None]


def is_packable(module: nn.Module) -> bool:
    """Return True if a module is a mixture of experts that can be computed packed."""
    if not hf_private.chooses_experts_function(module) or hf_private.is_spread_over_processes(module):
        return False
    names = stack_names(module)
    weights = [getattr(module, name) for name in names]
    return len(names) == 2 and all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights)


def put_stacks(experts: nn.Module, matrices: Mapping[str, PackedMatrix]) -> None:
    """Replace a mixture's parameters by packed ones.

    Args:
        experts (`nn.Module`): the mixture.
        matrices (`Mapping[str, PackedMatrix]`): both of its weights, by name, shape (experts * out, in).
    """
    before, transposed = hf_private.experts_function(experts), hf_private.is_transposed(experts, default=False)
    function = None if before == FUNCTION else before  # of a layer before this one, they share the config
    for name, packed in matrices.items():
        count = getattr(experts, name).shape[0]
        delattr(experts, name)
        setattr(experts, name, PackedStack(packed, count, transposed, function))
        getattr(experts, name).train(experts.training)
    hf_private.set_experts_function(experts, FUNCTION)


def take_stacks(experts: nn.Module) -> None:
    """Put dense parameters back, bit-equal, one after the other, and what computed the mixture before."""
    for name in stack_names(experts):
        stack = getattr(experts, name)
        dense = nn.Parameter(stack.dense())
        delattr(experts, name)
        setattr(experts, name, dense)
        if stack.function is not None:
            hf_private.set_experts_function(experts, stack.function)
