"""Trellis codes, a rival of this package's quantised weights, as in QTIP (Tseng et al., 2024). They compute values alone.

A weight is rotated at both sides by random orthogonal matrices, so that its elements are nearly Gaussian and one scale serves
the matrix. Its columns are coded one after the other, and later ones make up for the error of each, as in GPTQ. The values of
a column are walks over `2**STATES` states, which have a value each: a step shifts `bits` new bits into the state. A walk ends
in the state it begins in, so a weight takes `bits` bits, and a matrix one scale.
"""

from functools import cache

import torch

from optimum_neuronal.saliency.base import DAMPENING, DampenedHessian, inverse_factor


STATES = 10  # bits of a state
STEPS = 32  # rows of a walk, at most, a divisor of a weight's rows; the walks of a column are taken side by side
STRETCH = {1: 0.9, 2: 1.05, 3: 1.1, 4: 1.15}  # of the values, for a Gaussian of standard deviation 1: what loses least


def trellis_coded(weight: torch.Tensor, hessian: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """The weight after it was coded, shape (rows, columns). Arguments: see [`quantise`]."""
    left, right = _orthogonal(len(weight), 2), _orthogonal(len(hessian), 1)
    factor = DampenedHessian(right @ hessian @ right.T, DAMPENING, name).solve(inverse_factor)
    return left.T @ _code(left @ weight @ right.T, factor, bits) @ right


@cache
def _orthogonal(size: int, seed: int) -> torch.Tensor:
    """A random orthogonal matrix, shape (size, size)."""
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(drawn)[0].float()


@cache
def _values(bits: int) -> torch.Tensor:
    """The value of each state, shape (2**STATES,): quantiles of a Gaussian in random order."""
    quantiles = STRETCH[min(bits, 4)] * torch.special.ndtri((torch.arange(2**STATES) + 0.5) / 2**STATES)
    return quantiles[torch.randperm(2**STATES, generator=torch.Generator().manual_seed(0))]


def _code(weight: torch.Tensor, factor: torch.Tensor, bits: int) -> torch.Tensor:
    """The coded weight, shape (rows, columns); `factor` is the upper Cholesky factor of the inverse Hessian."""
    scale = weight.square().mean().sqrt().clamp(min=1e-30)
    left, coded = weight.clone(), torch.empty_like(weight)
    for column in range(weight.shape[1]):
        wanted = left[:, column] / scale
        coded[:, column] = scale * _closed_walks(wanted.view(-1, min(STEPS, len(wanted))), bits).flatten()
        error = (left[:, column] - coded[:, column]) / factor[column, column]
        left[:, column + 1 :] -= torch.outer(error, factor[column, column + 1 :])
    return coded


def _closed_walks(wanted: torch.Tensor, bits: int) -> torch.Tensor:
    """The values of walks that end in the state they begin in, shape (walks, steps); see [`_walk`].

    That state is taken from a free walk that has it in the middle.
    """
    half = wanted.shape[1] // 2
    state = _walk(wanted.roll(half, 1), bits)[:, half - 1]
    return _values(bits)[_walk(wanted, bits, state)]


def _walk(wanted: torch.Tensor, bits: int, ends: torch.Tensor | None = None) -> torch.Tensor:
    """The states whose values come nearest, int64, shape (walks, steps), by Viterbi's algorithm.

    Args:
        wanted (`Tensor`, shape (walks, steps)): values.
        bits (`int`): that a step shifts in.
        ends (`Tensor` of int64, shape (walks,), *optional*): the state before the first step, and the last. None: any.
    """
    values, (walks, steps) = _values(bits), wanted.shape
    branches, kept = 2**bits, 2 ** (STATES - bits)  # states before one differ in the bits that are shifted out
    cost = torch.zeros(walks, 2**STATES)
    if ends is not None:
        cost.fill_(torch.inf)[torch.arange(walks), ends] = 0
    came = []
    for step in range(steps):
        least, branch = cost.view(walks, branches, kept).min(dim=1)
        came.append(branch)
        cost = (values - wanted[:, step, None]).square_()
        cost.view(walks, kept, branches).add_(least[:, :, None])
    state = cost.argmin(dim=1) if ends is None else ends
    found = torch.empty_like(wanted, dtype=torch.int64)
    for step in reversed(range(steps)):
        found[:, step] = state
        before = state >> bits
        state = before + came[step].gather(1, before[:, None])[:, 0] * kept
    return found
