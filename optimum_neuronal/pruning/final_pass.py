"""The final pass over all calibration sequences: each block runs on the outputs of the pruned blocks before it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from ..blocks.block_inputs import Call, Stream, Streams
from ..blocks.offload import change_offloaded
from ..blocks.statistics import Norms, SquaredNorms, most_specific
from ..compat.hf_private import is_offloaded, offload_hook
from ..files.records import Finding
from ..model.projections import Block, Decoder, Projection, token_weights, trial_weights
from ..packed.change import Change, NewWeight
from ..packed.formats.quantized import QuantizedWeight
from ..packed.formats.sparse import StoredChange, of_parts, parts_of
from ..packed.packed_embedding import is_embedding, is_head
from ..packed.packed_module import packed_modules
from ..packed.replacing import has_own_forward, put_packed
from ..packed.sparsify import finish_packing
from ..saliency.plan import Plan
from ..saliency.prune_projections import Refine, prune_projections
from ..trials import Trials
from .refit import RUNS, Refit, first_zeros


LABEL = "changing the weights, block by block"


@dataclass(frozen=True)
class FinalPruning:
    """Finds the masks of a plan, and new or quantized weights if the saliency makes them. No weight is changed.

    For a refit, the dense model's stream runs beside the sparse one: each block is fitted to its output in the dense model.
    """

    trials: Trials
    plan: Plan
    refine: Refine | None = None  # edits every mask, see TopUp.refine
    statistic: type[SquaredNorms] = SquaredNorms  # of the inputs that `refine` needs
    refit: Refit | None = None

    def find(self) -> tuple[dict[str, Change], list[str]]:
        """Return the changes of weights by projection name, and the names of starved experts' projections."""
        trials, found, starved = self.trials, {}, []

        def take(index: int, block: Block, prune: Callable[[], Finding]) -> None:
            value, tensors = trials.records.recorded(f"block-{index:05d}", prune)
            starved.extend(value["starved"])
            for p in block.pruned:  # changes of offloaded weights wait in CPU memory
                device = torch.device("cpu") if is_offloaded(p.module) else p.weight.device
                found[p.name] = stored_change(p, tensors).to(device)

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            dense = [trials.runner.output(block, stream, calls) for stream in streams[1:]]
            if block.pruned:
                take(index, block, partial(self._fit_block, block, calls, streams[0], *dense))
            if block is trials.decoder.blocks[-1]:
                return streams  # nothing reads the last block's output
            with trial_weights(block.pruned, lambda p: found[p.name]):
                return [trials.runner.output(block, streams[0], calls), *dense]

        if trials.saliency.uses_activations or self._statistic is not SquaredNorms:
            trials.cache.release()
            inputs = trials.capture_all(self._statistic, self.refit and self.refit.batch_size(trials.ids.shape[1]))
            trials.runner.run(inputs, 1 if self.refit is None else 2, visit, LABEL, release=True)
        else:
            trials.runner.for_each_block(
                lambda index, block: take(index, block, partial(self._solve, block, None, self.plan)), LABEL
            )
        return found, starved

    @property
    def _statistic(self) -> type[SquaredNorms]:
        return most_specific(self.trials.statistic, self.statistic)

    def _fit_block(
        self, block: Block, calls: Sequence[Call], inputs: Stream, expected: Stream | None = None
    ) -> Finding:
        """Return the finding of a block, which `inputs` enter. A refit fits its values to the `expected` output."""
        norms = self.trials.runner.inputs_of(block, inputs, calls, self._statistic)
        refit = self.refit if expected is not None else None
        adds = refit is not None and self.trials.pattern is None
        plan = first_zeros(self.plan, block.pruned) if adds else self.plan
        found, tensors = self._solve(block, self.trials.joined(norms, self._statistic), plan)
        if refit is None:
            return found, tensors
        energies = {name: norm.value.sum(dim=0) for name, norm in norms.items()}
        runner, changes = self.trials.runner, {p.name: stored_change(p, tensors) for p in block.pruned}
        runner.block_forwards += RUNS * refit.epochs * inputs.sequences
        fitted = refit.fit(block, changes, energies, inputs, expected, calls, self.plan if adds else None)
        for projection in block.pruned:
            tensors |= parts_of(NewWeight(fitted[projection.name]), projection.weight, projection.name)
        return found, tensors

    def _solve(self, block: Block, norms: Norms | None, plan: Plan) -> Finding:
        """Return the starved experts of a block, and the packed parts of their masks or weights."""
        trials, tensors = self.trials, {}
        changes, starved = prune_projections(
            trials.saliency, block.pruned, norms, plan, trials.pattern, trials.min_expert_tokens, self.refine
        )
        for name, change in changes.items():
            tensors |= parts_of(change, block.projections[name].weight, name)
        return {"starved": starved}, tensors


def stored_change(projection: Projection, tensors: Mapping[str, torch.Tensor]) -> StoredChange:
    """Return the change of a projection's weight from the tensors of a finding."""
    return of_parts(tensors, projection.name, projection.shape, projection.owner.dtype)


def apply_changes(
    decoder: Decoder, changes: Mapping[str, Change], head: Mapping[str, QuantizedWeight] | None = None
) -> None:
    """Change the weights, in place; offloaded ones whenever they are read from now on. Quantized ones become modules."""
    quantized = {name: change for name, change in changes.items() if isinstance(change, QuantizedWeight)}
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            if name in quantized:
                continue
            if is_offloaded(projection.module):
                change_offloaded(projection, changes[name])
            else:
                changes[name].apply_to(projection.weight)
    if quantized or head:
        put_quantized(decoder, quantized, head or {})


@contextmanager
def changed_weights(decoder: Decoder, changes: Mapping[str, Change]) -> Iterator[None]:
    """Let a model compute with changes while the context lasts, offloaded ones whenever their weights are read."""
    projections = list(decoder.projections.values())
    offloaded = [p for p in projections if is_offloaded(p.module)]
    maps = {hook: hook.weights_map for hook in (offload_hook(p.module) for p in offloaded)}
    try:
        for projection in offloaded:
            change_offloaded(projection, changes[projection.name])
        with trial_weights([p for p in projections if p not in offloaded], lambda p: changes[p.name]):
            yield
    finally:
        for hook, weights in maps.items():
            hook.weights_map = weights


def put_quantized(
    decoder: Decoder, weights: Mapping[str, QuantizedWeight], head: Mapping[str, QuantizedWeight]
) -> None:
    """Replace modules by ones that compute with quantized weights. All experts of a layer have the same bits."""
    model = decoder.model
    _put_head(model, head)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, list[QuantizedWeight]] = {}
    for name, projection in decoder.projections.items():
        if name in weights:
            path = names[id(projection.module)]
            path = path if projection.expert is None else f"{path}.{projection.parameter}"
            found.setdefault(path, []).append(weights[name])
    for path, parts in found.items():
        put_packed(model, path, QuantizedWeight.joined(parts))
    if next(packed_modules(model), None) is not None:
        finish_packing(model)


def _put_head(model: PreTrainedModel, head: Mapping[str, QuantizedWeight]) -> None:
    """Put in quantized embeddings and head. A module without a packed form gets the rounded numbers dense."""
    by_weight = {id(weight): head[name] for name, weight in token_weights(model).items() if name in head}
    modules = {name: m for name, m in model.named_modules() if id(getattr(m, "weight", None)) in by_weight}
    for key, matrix in by_weight.items():
        sharing = {name: module for name, module in modules.items() if id(module.weight) == key}
        if all((is_embedding(m) or is_head(m)) and not has_own_forward(m) for m in sharing.values()):
            path = next((name for name, m in sharing.items() if isinstance(m, nn.Embedding)), next(iter(sharing)))
            put_packed(model, path, matrix)
        else:
            with torch.no_grad():
                next(iter(sharing.values())).weight.copy_(matrix.unpack())
