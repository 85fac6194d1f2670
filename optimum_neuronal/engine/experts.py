"""Runs a mixture of experts one expert after the other, so that what each of them receives can be measured.

transformers keeps the experts of a layer as weights of shape (experts, ., .) and multiplies them with fused kernels,
which no hook can look into. The forward below computes the same from the module's own attributes; it takes the place
of the module's forward only while inputs are recorded.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from ..compat import transformers as internals
from ..model.architectures import MLP_ENTRIES, is_gated
from ..model.projections import Experts, Projection
from .statistics import SquaredNorms


class RecordingExperts:
    """The forward of one mixture of experts, which adds what every expert receives to a statistic of its own.

    Args:
        experts ([`Experts`]): the mixture.
        projections (`Sequence[Projection]`): all of its projections.
        recorded (`dict`): projection name -> statistic, filled as the module runs.
        sequences (`int`): sequences in the batch.
        statistic (`type[SquaredNorms]`): what is gathered.
        skipped (`Sequence[Projection]`): projections whose output is not needed: zeros take its place.
    """

    def __init__(
        self,
        experts: Experts,
        projections: Sequence[Projection],
        recorded: dict[str, SquaredNorms],
        sequences: int,
        statistic: type[SquaredNorms] = SquaredNorms,
        skipped: Sequence[Projection] = (),
    ):
        self.module, self.recorded, self.sequences = experts.module, recorded, sequences
        self.statistic = statistic
        self.up = [p for p in projections if p.role in MLP_ENTRIES]
        self.down = [p for p in projections if p.role not in MLP_ENTRIES]
        self.skips_up, self.skips_down = self.up[0] in skipped, self.down[0] in skipped
        self.forward = self._stacked if experts.stacked else self._routed

    def _routed(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The calling convention of most families.

        Args:
            hidden (`Tensor`, shape (tokens, hidden size)): the tokens of the batch, sequence by sequence.
            indices, weights (`Tensor`, shape (tokens, k)): the experts of every token, and how much each counts.
        """
        if self.skips_up:
            return torch.zeros_like(hidden)
        # One sequence after the other, since the last bits of a product may depend on the number of its rows.
        tokens = hidden.reshape(-1, hidden.shape[-1])
        parts = (part.chunk(self.sequences) for part in (tokens, indices, weights))
        return torch.cat([self._sequence(*part) for part in zip(*parts)]).view_as(hidden)

    def _sequence(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, k = indices.shape
        chosen = indices.flatten()
        # Reading the sizes is the only time that an accelerator is waited for.
        sizes = torch.bincount(chosen, minlength=len(self.up)).tolist()
        slots_by_expert = chosen.sort(stable=True).indices.split(sizes)
        outputs = hidden.new_zeros(tokens * k, hidden.shape[-1], dtype=torch.result_type(hidden, weights))
        for expert, slots in enumerate(slots_by_expert[: len(self.up)]):
            result = self._run(expert, hidden[slots // k], slots // k, tokens)
            if result is not None:
                outputs[slots] = result * weights.flatten()[slots, None]
        return outputs.view(tokens, k, -1).sum(dim=1).to(hidden.dtype)

    def _stacked(self, hidden: torch.Tensor) -> torch.Tensor:
        """`Architecture.stacked_experts`: inputs of shape (experts * tokens, hidden size), zero for other experts' tokens."""
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
        """What the expert makes of its inputs, shape (n, hidden size): of the tokens `rows` of a sequence of `tokens`."""
        self._record(self.up[expert], inputs, rows, tokens)
        inner = self._project(self.up[expert], inputs)
        inner = internals.activate(self.module, inner, gated=is_gated(self.up[expert].role))
        self._record(self.down[expert], inner, rows, tokens)
        if self.skips_down or not len(rows):
            return None
        return internals.finish(self.module, self._project(self.down[expert], inner))

    def _record(self, projection: Projection, inputs: torch.Tensor, rows: torch.Tensor, tokens: int) -> None:
        statistic = self.recorded.setdefault(projection.name, self.statistic())
        statistic.update_routed(inputs, rows, tokens)

    def _project(self, projection: Projection, inputs: torch.Tensor) -> torch.Tensor:
        bias = internals.expert_bias(self.module, projection.parameter, projection.expert)
        return linear(inputs, projection.weight, bias)
