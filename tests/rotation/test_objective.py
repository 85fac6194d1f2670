"""The objective against its formula, which is written out here for the rotated model itself."""

from contextlib import contextmanager

import pytest
import torch
from conftest import make_model
from forward import inputs_of
from turning import random_rotations, rotated_of, uneven

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.rotation.learning import Rotation, cayley
from optimum_neuronal.rotation.merging import Originals, Rotations
from optimum_neuronal.rotation.objective import DAMPENING, LEAST_ROWS, block_loss, divide_rows


@contextmanager
def terms_of(model, ids, fisher=None, **chosen):
    """The terms of a model, by block, while its norms are folded; its rotated and their originals."""
    rotated = rotated_of(model, **chosen)
    originals, runner = Originals(rotated), BlockRunner(rotated.decoder, 4, quiet=True)
    with inference(model):
        originals.merge(Rotations.identity(rotated))
        yield (
            rotated,
            originals,
            Rotation.find_terms(rotated, runner, ids, fisher or dict.fromkeys(rotated.decoder.projections, 1.0)),
        )


def objective(terms, rotations, share) -> float:
    stream = None if rotations.stream is None else rotations.stream.float()
    return sum(
        float(block_loss(own, stream, heads.float(), share, torch.Generator()))
        for own, heads in zip(terms, rotations.heads)
    )


def plain_objective(model, ids, fisher, share, names) -> float:
    """`L` of the module for a model whose weights are rotated already: of H' = R^T H R, whose inverse is R^T H^-1 R."""
    projections = {name: p for name, p in find_decoder(model).projections.items() if name in names}
    inputs, total = {name: x.double() for name, x in inputs_of(model, ids, projections).items()}, 0.0
    for name, projection in projections.items():
        if name not in inputs:
            continue  # an expert that no token has reached
        own, read = inputs[name], inputs[name]
        if projection.role == "gate_up" and projection.expert is not None:  # experts of a mixture have one Hessian
            read = torch.cat([x for other, x in inputs.items() if projections[other].group == projection.group])
        hessian = read.T @ read / len(read)
        hessian += DAMPENING * hessian.diagonal().mean() * torch.eye(len(hessian))
        weight = projection.weight.double()
        importance = (weight.square() / torch.linalg.inv(hessian).diagonal()).flatten()
        cut = importance.sort().values[int(share * importance.numel()) - 1]
        energy = (own @ weight.T).square().sum() / len(own)
        total += fisher[name] * float(importance[importance <= cut].sum() / energy)
    return total


@pytest.mark.parametrize("family", ["mistral", "qwen2", "phi3", "gemma", "mixtral", "gemma2"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_it_is_what_a_threshold_cuts_in_the_rotated_model(family, share, ids):
    """Grouped queries, biases, fused projections, norms of `1 + weight`, experts, heads alone."""
    model = uneven(make_model(family))
    fisher = {name: 1.0 + index for index, name in enumerate(find_decoder(model).projections)}
    with terms_of(model, ids, fisher) as (rotated, originals, terms):
        names = {term.projection.name for own in terms for term in own}
        for rotations in (Rotations.identity(rotated), random_rotations(rotated)):
            found = objective(terms, rotations, share)
            originals.merge(rotations)
            assert found == pytest.approx(plain_objective(model, ids, fisher, share, names), rel=1e-3)
            originals.merge(Rotations.identity(rotated))
    assert len(names) == (6 if family == "gemma2" else len(fisher)), "all that a rotation changes"


@pytest.mark.parametrize("family", ["phi3", "mixtral", "gemma2"])
def test_its_gradient(family, ids, monkeypatch):
    """Against finite differences in float64, at fixed thresholds, along a direction at random."""
    with terms_of(uneven(make_model(family)), ids[:4]) as (rotated, _originals, terms), torch.enable_grad():
        monkeypatch.setattr(torch.Tensor, "float", lambda self: self.double())
        for term in (term for own in terms for term in own):
            term.inverse = term.inverse.double()
        generators = [0.1 * torch.randn_like(rotation) for rotation in Rotations.identity(rotated).tensors().values()]

        def loss(generators, look=False):
            stream = cayley(generators[0]) if rotated.rotates_stream else None
            rotations = [cayley(generator) for generator in generators[rotated.rotates_stream :]]
            return sum(
                block_loss(own, stream, turned, 0.6, torch.Generator() if look else None)
                for own, turned in zip(terms, rotations)
            )

        loss(generators, look=True)
        for term in (term for own in terms for term in own):
            term.cut = term.cut * (1 + 1e-5)  # the weight at the threshold would jump
        leaves = [generator.clone().requires_grad_() for generator in generators]
        gradients = torch.autograd.grad(loss(leaves), leaves)
        direction, step = [torch.randn_like(generator) for generator in generators], 1e-7
        ahead, behind = (loss([g + sign * step * d for g, d in zip(generators, direction)]) for sign in (1, -1))
        slope = sum(float((gradient * d).sum()) for gradient, d in zip(gradients, direction))
        assert slope == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-4)
        assert all(bool(gradient.any()) for gradient in gradients)


def test_thresholds_stay_until_they_are_looked_at(llama, ids):
    with terms_of(llama, ids[:4]) as (rotated, _originals, terms):
        first, second = random_rotations(rotated), random_rotations(rotated)
        objective(terms, first, 0.6)
        cuts = [term.cut.clone() for own in terms for term in own]
        block_loss(terms[0], second.stream.float(), second.heads[0].float(), 0.6, None)
        assert all(torch.equal(cut, term.cut) for cut, term in zip(cuts, terms[0]))
        block_loss(terms[0], second.stream.float(), second.heads[0].float(), 0.6, torch.Generator())
        assert not any(torch.equal(cut, term.cut) for cut, term in zip(cuts, terms[0]))


def test_what_is_left_out_has_no_term(ids):
    with terms_of(make_model("llama"), ids[:4], ignore=[r"layers\.1\.", "up_proj"]) as (_rotated, _originals, terms):
        assert [len(own) for own in terms] == [6, 0, 6]
        assert not any("up_proj" in term.projection.name for own in terms for term in own)


def test_experts_without_tokens_have_no_term(ids):
    """Routers of zeros send all tokens to the same two of four."""
    model = make_model("mixtral")
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight.zero_()
    with terms_of(model, ids[:4]) as (_rotated, _originals, terms):
        for own in terms:
            assert len({term.projection.expert for term in own} - {None}) == 2 and len(own) == 4 + 2 * 2


@pytest.mark.parametrize("family", ["phi3", "mixtral", "gemma2"])
def test_what_is_drawn_are_rotated_rows(family, ids):
    """Of writers columns; of heads' values some when they are rotated. They stand for the whole."""
    with terms_of(uneven(make_model(family)), ids[:4]) as (rotated, _originals, terms):
        rotations, generator = random_rotations(rotated), torch.Generator().manual_seed(0)
        stream = None if rotations.stream is None else rotations.stream.float()
        for term, heads in ((term, heads.float()) for own, heads in zip(terms, rotations.heads) for term in own):
            diagonal, by_column = None, term.projection in {*term.rotated.writers, term.rotated.heads.reader}
            if any(term.projection in readers for _, readers in term.rotated.folds):
                diagonal = ((term.inverse @ stream) * stream).sum(0)
            found = []
            for term.rows in (1.0, 0.25):
                term.draw(generator)
                importance = term.importance(stream, heads, diagonal)
                whole = term.weight * term.projection.numel * float(importance.mean())
                assert float(term.lost(importance, 1.0)) == pytest.approx(whole, rel=1e-4)
                found.append(importance.T if by_column else importance)
            every, few = found
            assert len(few) == len(every) // 4, term.projection.name
            distances = (every[None] - few[:, None]).abs().amax(-1) / every.mean()
            assert float(distances.amin(1).max()) < 1e-4, "rows of the whole"
            assert len(set(distances.argmin(1).tolist())) == len(few), "each once"


@pytest.mark.parametrize("family", ["mixtral", "gemma2"])
def test_most_rows_are_drawn_where_most_is_lost(family, ids):
    with terms_of(uneven(make_model(family)), ids[:4]) as (rotated, _originals, by_block):
        terms = [term for own in by_block for term in own]
        terms[0].weight *= 1000
        lost, unrotated = {term: term.measure(0.6) for term in terms}, Rotations.identity(rotated)
        assert sum(lost.values()) == pytest.approx(objective(by_block, unrotated, 0.6), rel=1e-4)
        divide_rows(lost, 0.5)
        drawn = sum(term.rows * term.projection.numel for term in terms) / sum(t.projection.numel for t in terms)
        assert drawn == pytest.approx(0.5, rel=1e-3) and terms[0].rows == 1
        assert all(0.5 / LEAST_ROWS <= term.rows <= 1 for term in terms)
        between = [t for t in terms if 0.5 / LEAST_ROWS < t.rows < 1]
        densities = [lost[term] / term.projection.numel / term.rows**2 for term in between]
        assert len(between) > 1 and max(densities) == pytest.approx(min(densities), rel=1e-6)
