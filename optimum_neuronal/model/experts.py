"""MoE layers: the weights of their experts, and the inputs that each expert receives.

transformers stacks the experts of a layer in weights of shape (experts, ., .) and multiplies them with fused kernels,
which hooks cannot observe. To observe inputs, [`ObservedExperts`] computes the layer one expert after the other. Names
of routers are in `architectures`; attributes of transformers' modules are read in `compat.hf_private`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..compat import hf_private
from .architectures import MLP_ENTRIES, Architecture
from .projections import Experts, Projection


def expert_projections(
    name: str, module: nn.Module, key: str, role: str, architecture: Architecture, takes
) -> list[Projection]:
    """Return the projections of all experts in the stacked weight `key`, pruned where `takes(name)` is True."""
    if role == "gate_up" and not getattr(module, "is_concatenated", True):
        role = "interleaved_gate_up"
    transposed = getattr(module, "is_transposed", architecture.stacked_experts)
    names = [f"{name}.{index}.{key}" for index in range(len(getattr(module, key)))]
    return [Projection(full, role, module, takes(full), key, index, transposed) for index, full in enumerate(names)]


class ObservedExperts:
    """A forward of an MoE layer that observes the inputs of each expert. `skipped` projections return zeros."""

    def __init__(
        self,
        experts: Experts,
        projections: Mapping[str, Projection],
        observed: dict[str, Any],
        sequences: int,
        statistic: type,
        skipped: Sequence[Projection] = (),
    ):
        self.module, self.observed, self.sequences = experts.module, observed, sequences
        self.statistic = statistic
        members = [p for p in projections.values() if p.module is experts.module]
        self.up = [p for p in members if p.role in MLP_ENTRIES]
        self.down = [p for p in members if p.role not in MLP_ENTRIES]
        self.skips_up, self.skips_down = self.up[0] in skipped, self.down[0] in skipped
        self.forward = self._stacked if experts.stacked else self._routed

    def _routed(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the layer: `hidden` has shape (tokens, hidden size), `indices` and `weights` (tokens, k)."""
        if self.skips_up:
            return torch.zeros_like(hidden)
        # One sequence after the other: the last bits of a product may depend on the number of its rows.
        tokens = hidden.reshape(-1, hidden.shape[-1])
        pieces = (piece.chunk(self.sequences) for piece in (tokens, indices, weights))
        return torch.cat([self._sequence(*piece) for piece in zip(*pieces)]).view_as(hidden)

    def _sequence(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, k = indices.shape
        chosen = indices.flatten()
        sizes = torch.bincount(chosen, minlength=len(self.up)).tolist()  # the only wait for an accelerator
        slots_by_expert = chosen.sort(stable=True).indices.split(sizes)
        outputs = hidden.new_zeros(tokens * k, hidden.shape[-1], dtype=torch.result_type(hidden, weights))
        for expert, slots in enumerate(slots_by_expert[: len(self.up)]):
            result = self._run(expert, hidden[slots // k], slots // k, tokens)
            if result is not None:
                outputs[slots] = result * weights.flatten()[slots, None]
        return outputs.view(tokens, k, -1).sum(dim=1).to(hidden.dtype)

    def _stacked(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the layer from stacked inputs, (experts * tokens, hidden size), zero for other experts' tokens."""
        outputs = torch.zeros_like(hidden)
        if self.skips_up:
            return outputs
        shape = (len(self.up), self.sequences, -1, hidden.shape[-1])
        for expert, (inputs, results) in enumerate(zip(hidden.view(shape), outputs.view(shape))):
            for sequence, result in zip(inputs, results):
                rows = sequence.any(dim=-1).nonzero().flatten()
                output = self._run(expert, sequence[rows], rows, len(sequence))
                if output is not None:
                    result[rows] = output
        return outputs

    def _run(self, expert: int, inputs: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor | None:
        """Return an expert's output for its inputs, (n, hidden size): the tokens `rows` of a sequence of `tokens`."""
        self._observe(self.up[expert], inputs, rows, tokens)
        inner = self._project(self.up[expert], inputs)
        inner = hf_private.activate(self.module, inner, gated=self.up[expert].role != "up")
        self._observe(self.down[expert], inner, rows, tokens)
        if self.skips_down or not len(rows):
            return None
        return hf_private.finish(self.module, self._project(self.down[expert], inner))

    def _observe(self, projection: Projection, inputs: torch.Tensor, rows: torch.Tensor, tokens: int) -> None:
        self.observed.setdefault(projection.name, self.statistic()).update_routed(inputs, rows, tokens)

    def _project(self, projection: Projection, inputs: torch.Tensor) -> torch.Tensor:
        bias = hf_private.expert_bias(self.module, projection.parameter, projection.expert)
        output = linear(inputs, projection.weight)
        return output if bias is None else output + bias  # rounded in between, as transformers does
