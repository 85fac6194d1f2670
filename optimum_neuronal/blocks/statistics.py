"""Statistics of the inputs of projections, gathered by hooks while a block runs."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..common.torch_state import full_precision
from ..compat import hf_private


class SquaredNorms:
    """Sums over the tokens of each sequence of the squared input, feature by feature.

    `value`, shape (sequences, in), is float32. Sequences are kept apart, so that batches do not change the result.
    """

    def __init__(self, values: Sequence[torch.Tensor] = (), tokens: int = 0):
        self.tokens = tokens
        self._values = list(values)

    def update(self, inputs: torch.Tensor, sequences: int) -> None:
        """Add a batch of inputs of shape (sequences, tokens, in), or flattened to (sequences * tokens, in)."""
        inputs = inputs.reshape(sequences, -1, inputs.shape[-1]).float()
        self.tokens += inputs.shape[0] * inputs.shape[1]
        self._add_sums(inputs)

    def update_routed(self, inputs: torch.Tensor, rows: torch.Tensor, tokens: int) -> None:
        """Add the inputs of one sequence, shape (n, in), that an expert received from its tokens `rows`, shape (n,).

        Sums are over all `tokens` of the sequence, the others being zero, so that their rounding does not depend on n.
        """
        padded = inputs.new_zeros(1, tokens, inputs.shape[-1], dtype=torch.float32)
        padded[0, rows] = inputs.float()
        self.tokens += len(inputs)
        self._add_sums(padded)

    def _add_sums(self, inputs: torch.Tensor) -> None:
        """Add the sums over the tokens of inputs, float32 of shape (sequences, tokens, in)."""
        self._values.append(inputs.square().sum(dim=1))

    @property
    def value(self) -> torch.Tensor:
        if len(self._values) > 1:
            self._values = [torch.cat(self._values)]
        return self._values[0]


class Hessian(SquaredNorms):
    """Squared norms, and `hessian`: the sum of `x x^T` over all inputs x, float32, shape (in, in).

    Sequences are added one after the other, so that batches do not change the sum.
    """

    def __init__(self):
        super().__init__()
        self.hessian: torch.Tensor | None = None

    def update(self, inputs: torch.Tensor, sequences: int) -> None:
        super().update(inputs, sequences)
        for sequence in inputs.reshape(sequences, -1, inputs.shape[-1]).float():
            self._add_products(sequence)

    def update_routed(self, inputs: torch.Tensor, rows: torch.Tensor, tokens: int) -> None:
        super().update_routed(inputs, rows, tokens)
        self._add_products(inputs.float())

    def _add_products(self, inputs: torch.Tensor) -> None:
        if self.hessian is None:
            self.hessian = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1])
        with full_precision():
            self.hessian.addmm_(inputs.T, inputs)


Norms = Mapping[str, SquaredNorms]  # projection name -> squared norms of its input


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, but float32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def activation(squared_norms: torch.Tensor) -> torch.Tensor:
    """Return the activation `a_j = sqrt(mean over sequences of sum over tokens of x_j^2)`, float32, shape (in,).

    `squared_norms` has shape (sequences, in).
    """
    return squared_norms.to(wide_dtype(squared_norms.device)).mean(dim=0).sqrt().float()


@contextmanager
def observe_inputs(
    modules: Mapping[str, nn.Module],
    observed: dict[str, SquaredNorms],
    batch: tuple[int, int],
    statistic=SquaredNorms,
) -> Iterator[None]:
    """Add the inputs of every module, for one batch of (sequences, tokens), to `observed` while the context lasts.

    Modules that receive the same tensor object (q, k and v; gate and up) share one statistic, computed once. Modules
    that did not receive every token once are missing.
    """
    seen: list[tuple[weakref.ref, int, SquaredNorms]] = []  # weak: a statistic must not keep activations alive

    def observing(name: str) -> Callable:
        def observe(_module, args) -> None:
            inputs = args[0]
            for reference, version, shared in seen:
                if reference() is inputs and version == hf_private.content_version(inputs):
                    observed[name] = shared
                    return
            if inputs.shape[:-1].numel() != batch[0] * batch[1]:
                return  # only some of the tokens, and it is unknown which
            sums = observed.setdefault(name, statistic())
            sums.update(inputs, batch[0])
            seen.append((weakref.ref(inputs), hf_private.content_version(inputs), sums))

        return observe

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_pre_hook(observing(name)))
        yield
