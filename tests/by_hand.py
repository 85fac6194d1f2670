"""Blocks made by hand, and what tests of top-ups compare with."""

from types import SimpleNamespace

import torch
from torch import nn

from optimum_neuronal.model.projections import Block, Projection


def make_projection(weight, name: str = "p") -> Projection:
    """A projection of a weight given as rows."""
    weight = torch.as_tensor(weight, dtype=torch.float32)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return Projection(name, None, linear, pruned=True)


def make_block(*weights, name: str = "block") -> Block:
    """A block of projections `{name}.0`, `{name}.1`, ..., all of them pruned."""
    projections = [make_projection(weight, f"{name}.{index}") for index, weight in enumerate(weights)]
    return Block(name, nn.Module(), {projection.name: projection for projection in projections})


def make_experts(count: int, shape=(2, 4), transposed=False, parameter="up") -> Block:
    """A block of experts `experts.0.up`, `experts.1.up`, ..., whose weights of ones lie in one parameter."""
    module = nn.Module()
    setattr(module, parameter, nn.Parameter(torch.ones(count, *shape)))
    names = [f"experts.{expert}.{parameter}" for expert in range(count)]
    experts = [Projection(name, "up", module, True, parameter, i, transposed) for i, name in enumerate(names)]
    return Block("block", module, dict(zip(names, experts)))


class FakeTrials:
    """Answers with errors of its own choice, so that decisions can be checked."""

    def __init__(self, blocks, errors=None, activations=None):
        projections = {name: p for block in blocks for name, p in block.projections.items()}
        self.decoder = SimpleNamespace(blocks=blocks, projections=projections)
        self.errors, self.activations, self.asked = errors, activations, []
        self.saliency = SimpleNamespace(updates_weights=False)

    def measure(self, question, plans):
        self.asked.append((question, plans))
        return self.errors[: len(plans)]

    def measure_once(self, question):
        self.asked.append((question, ()))
        return [question.score(block, self.activations) for block in self.decoder.blocks]


class FakeOutputs:
    """PlanEvaluator whose output errors a function computes from the sparsities of the blocks."""

    def __init__(self, decoder, error=lambda sparsities: 1.0):
        self.decoder, self.error, self.asked = decoder, error, []
        self.saliency = SimpleNamespace(updates_weights=False)

    def measure(self, question, plans):
        self.asked.append((len(plans), question.metric, question.sequences))
        return [self.error(by_block(self.decoder.blocks, plan)) for plan in plans]


def mean(space, sparsities) -> float:
    """Mean sparsity of all weights of a search space."""
    return ((sparsities * space.sizes).sum() / space.sizes.sum()).item()


def by_block(blocks, plan) -> list[float]:
    """Sparsities of blocks all of whose projections have the same."""
    return [plan.sparsity[block.pruned_names[0]] for block in blocks]
