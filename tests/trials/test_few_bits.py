"""Values of few bits for the projections of a block."""

import torch
from conftest import make_model

from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.trials.few_bits import Solved, round_solved


def solved_of(model, hessian: bool) -> list[Solved]:
    found = []
    for number, projection in enumerate(find_decoder(model).blocks[0].pruned):
        rows, columns = projection.shape
        generator = torch.Generator().manual_seed(number)
        # Every other expert's values lie far from zero: alone it would choose other levels.
        sparse = torch.randn(rows, columns, generator=generator)
        sparse = sparse.sign() if number % 2 else sparse
        inputs = torch.randn(50, columns, generator=generator)
        own = inputs.T @ inputs
        found.append(Solved(projection, sparse, own.diagonal(), sparse, own if hessian else None))
    return found


def test_experts_that_share_a_parameter_share_levels():
    model = make_model("mixtral")
    solved = solved_of(model, hessian=True)
    rounded = round_solved(solved, 3)
    assert set(rounded) == {entry.projection.name for entry in solved}
    owners = {entry.projection.owner: torch.zeros_like(entry.projection.owner) for entry in solved}
    for entry in solved:
        entry.projection.view(owners[entry.projection.owner]).copy_(rounded[entry.projection.name])
    assert any(owner.ndim == 3 for owner in owners)
    assert all(CodedWeight.exact(weight, 3) is not None for weight in owners.values())


def test_with_a_hessian_values_make_up_for_each_other():
    model = make_model("llama").bfloat16()
    losses = []
    for hessian in (False, True):
        total = 0.0
        for entry, other in zip(solved_of(model, hessian), solved_of(model, True)):
            found = round_solved([entry], 2)[entry.projection.name]
            assert found.dtype == torch.bfloat16
            missing = entry.sparse - found.float()
            total += float(((missing @ other.hessian) * missing).sum())
        losses.append(total)
    assert losses[1] < losses[0]
