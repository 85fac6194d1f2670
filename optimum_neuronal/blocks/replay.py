"""Runs one block on captured hidden states, and records the inputs of its projections.

transformers keeps the experts of a mixture as weights of shape (experts, ., .) and multiplies them with fused kernels,
which no hook can look into. While inputs are recorded, [`RecordingExperts`] computes the output from the
module's own attributes, one expert after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch.nn.functional import linear

from ..compat import hf_private
from ..model.architectures import MLP_ENTRIES
from ..model.projections import Block, Experts, Projection
from .calls import Call, first_output, keep_shared, replaced_forward, restore_shared, to_device
from .statistics import SquaredNorms, record_inputs


def replay(
    block: Block,
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
    record: type[SquaredNorms] | None = SquaredNorms,
    skipped: Sequence[Projection] = (),
) -> tuple[list[torch.Tensor], dict[str, SquaredNorms]]:
    """Run one block on the hidden states of every batch.

    Args:
        block ([`Block`]): runs with its current weights.
        hidden (`Sequence[Tensor]`): one tensor of shape (batch, tokens, hidden size) per batch.
        calls (`Sequence[Call]`): the block's calls, one per batch.
        record (`type[SquaredNorms]`, *optional*): statistic of its projections' inputs; None records nothing.
        skipped (`Sequence[Projection]`):
            Projections that only feed the block's output, for a caller who does not need it. They return zeros.

    Returns:
        `tuple`: the outputs, one tensor per batch, and the norms by projection name.
    """
    outputs, recorded = [], {}
    with ExitStack() as stack:
        for projection in skipped:
            if projection.expert is None:
                stack.enter_context(replaced_forward(projection.module, _zeros(projection.shape[0])))
        device = next(block.module.parameters()).device
        for states, call in zip(hidden, calls):
            restore_shared(states, call)
            states = to_device(states, device)
            with _recording(block, recorded, states.shape[:2], record, skipped) if record else nullcontext():
                outputs.append(first_output(block.module(states, *call.args, **call.kwargs)))
            keep_shared(outputs[-1], states, call)
    return outputs, recorded


@contextmanager
def _recording(
    block: Block,
    recorded: dict[str, SquaredNorms],
    batch: tuple[int, int],
    statistic: type[SquaredNorms],
    skipped: Sequence[Projection],
) -> Iterator[None]:
    """Record the inputs of all projections, also of experts, while the context lasts."""
    watched = {name: p.module for name, p in block.projections.items() if p.expert is None}
    watched |= {experts.name: experts.module for experts in block.experts if not experts.stacked}
    with ExitStack() as stack:
        stack.enter_context(record_inputs(watched, recorded, batch, statistic))
        for experts in block.experts:
            own = [p for p in block.projections.values() if p.module is experts.module]
            if any(p.pruned for p in own):
                forward = RecordingExperts(experts, own, recorded, batch[0], statistic, skipped).forward
                stack.enter_context(replaced_forward(experts.module, forward))
        yield


def _zeros(features: int) -> Callable:
    return lambda inputs: inputs.new_zeros(*inputs.shape[:-1], features)


class RecordingExperts:
    """The forward of one mixture of experts. It adds the inputs of every expert to a statistic of its own.

    Args:
        experts ([`Experts`]): the mixture.
        projections (`Sequence[Projection]`): all of its projections.
        recorded (`dict`): projection name -> statistic, filled as the module runs.
        sequences (`int`): sequences in the batch.
        statistic (`type[SquaredNorms]`): of the inputs.
        skipped (`Sequence[Projection]`): projections whose output is not needed. They return zeros.
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
        """Compute the mixture, by the calling convention of most families.

        Args:
            hidden (`Tensor`, shape (tokens, hidden size)): the tokens of the batch, sequence by sequence.
            indices, weights (`Tensor`, shape (tokens, k)): the experts of every token, and their weights.
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
        """Compute `Architecture.stacked_experts`: inputs (experts * tokens, hidden size), zero for other experts' tokens."""
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
        """Return an expert's output for its inputs, (n, hidden size), the tokens `rows` of a sequence of `tokens`."""
        self._record(self.up[expert], inputs, rows, tokens)
        inner = self._project(self.up[expert], inputs)
        inner = hf_private.activate(self.module, inner, gated=self.up[expert].role != "up")
        self._record(self.down[expert], inner, rows, tokens)
        if self.skips_down or not len(rows):
            return None
        return hf_private.finish(self.module, self._project(self.down[expert], inner))

    def _record(self, projection: Projection, inputs: torch.Tensor, rows: torch.Tensor, tokens: int) -> None:
        statistic = self.recorded.setdefault(projection.name, self.statistic())
        statistic.update_routed(inputs, rows, tokens)

    def _project(self, projection: Projection, inputs: torch.Tensor) -> torch.Tensor:
        bias = hf_private.expert_bias(self.module, projection.parameter, projection.expert)
        return linear(inputs, projection.weight, bias)
