"""Low-bit weights: codes and scales for the weights of a projection, so that its outputs change least.

Levels are odd, without a zero: a value is `scale[row] * step[column] * (2 * code - (2**bits - 1))`. Codes are chosen
column by column, and later columns compensate for each error (Frantar et al., GPTQ, 2022): first for several scales, of
which each row takes its best, then along several paths of codes. Then coordinate descent improves codes (Behdin et al.,
QuantEase, 2023) and scales in turn.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..common.machine import full_precision
from ..packed.change import Change
from ..packed.formats.quantized import QuantizedWeight
from .base import Solver, inverse_factor, solve_dampened


BLOCK = 64  # columns whose updates are applied to later ones at once
LEAST_PATHS, MOST_PATHS = 4, 16  # paths of codes to follow for each row
PATH_COLUMNS = 1 << 12  # columns of all paths of a row together
SEARCHED = 32  # columns of paths whose updates are applied to later ones at once
SWEEPS = 4  # sweeps of coordinate descent at most
LEAST_TRIED, MOST_TRIED = 12, 48  # scales to try for each row
TRIED_COLUMNS = 1 << 15  # columns of all scales tried for a row together
LOWEST, HIGHEST = 0.7, 1.4  # range of the scales to try, relative to the usual scale
CHUNK = 1 << 13  # rows to quantize at once
# Bits -> the usual scale of a row with standard deviation 1.
USUAL = {2: 0.5, 3: 0.295, 4: 0.17, 5: 0.095, 6: 0.052, 7: 0.029}
SPREAD, TINY = 16.0, 1e-30  # steps lie between 1 / SPREAD and SPREAD
LARGEST = 127  # the largest level of 8 bits
STEPS_FROM = 512  # rows of a weight from which steps pay for their bits


@dataclass(frozen=True)
class LowBit(Solver):
    """Quantizes weights if the config sets `bits_per_weight`. It is not registered as a saliency."""

    name: ClassVar[str] = "low-bit"
    knows_rows: ClassVar[bool] = False

    paths: bool = True  # False for trials, which take half the work

    def solve(self, weights, hessian, amounts, dtype, pattern=None, shared=False) -> dict[str, Change]:
        quantizer, changes = Quantizer(hessian, ", ".join(weights), quick=not self.paths), {}
        for name, weight in weights.items():
            bits = int(amounts[name])
            codes, scales, steps = quantizer.quantize(weight, bits, has_steps(len(weight), bits, shared))
            changes[name] = QuantizedWeight.encode(codes, bits, scales, steps, dtype)
        return changes

    def quick(self) -> "LowBit":
        """Return the variant for trials, which takes half the work."""
        return replace(self, paths=False)


def has_steps(rows: int, bits: int, shared: bool) -> bool:
    """Return True if a quantized weight gets a step per column. `shared`: an expert in one parameter with others."""
    return rows >= STEPS_FROM and bits < 8 and not shared


class Quantizer:
    """Quantizes weights with one input, whose Hessian is (columns, columns). `quick`: half the work, 5% more error."""

    def __init__(self, hessian: torch.Tensor, name: str = "the weight", quick: bool = False):
        self._quick, self._dead = quick, hessian.diagonal() == 0  # inputs that are always zero

        def factor(matrix: torch.Tensor) -> torch.Tensor | None:
            diagonal = matrix.diagonal()
            diagonal[self._dead] = diagonal.min()
            self._order = diagonal.argsort(descending=True, stable=True)
            self._matrix = matrix[self._order][:, self._order]
            return inverse_factor(self._matrix)

        self._factor = solve_dampened(hessian, Solver.dampening, name, factor)

    def quantize(
        self, weight: torch.Tensor, bits: int, steps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return codes, scales and steps of a weight, (rows, columns), for [`QuantizedWeight.encode`]. 8 bits are rounded.

        With `steps`, every column has a step: about 5% less error, worth its 16 bits from about 500 rows on.
        """
        if bits == 8:
            scales = (weight.abs().amax(dim=1) / LARGEST).to(torch.bfloat16)
            codes = (weight * _inverse(scales.float())[:, None]).round_().clamp_(-LARGEST, LARGEST)
            return codes.to(torch.int8), scales, None
        weight = weight.masked_fill(self._dead, 0)
        target, matrix, factor, widths = weight[:, self._order].T, self._matrix, self._factor, None
        if steps:  # root mean squares of the columns, relative to that of the whole weight
            squares = weight.square().mean(dim=0)
            widths = (squares / squares.mean().clamp(min=TINY)).sqrt().clamp(1 / SPREAD, SPREAD).to(torch.bfloat16)
            wide = widths[self._order].float()
            target, matrix, factor = target / wide[:, None], matrix * wide * wide[:, None], factor / wide
        with full_precision():
            codes, scales = _Solver(target.contiguous(), matrix, factor, bits, self._quick).solve()
        codes = codes.T[:, self._order.argsort()].to(torch.uint8).contiguous()
        return codes, scales.to(torch.bfloat16), widths


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """Return 1 / scales, 0 where they are 0."""
    return torch.where(scales > 0, 1 / scales, 0)


def _follow(paths: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
    """Return paths, (columns, paths, rows), each from the place of its parent, (paths, rows)."""
    return paths.gather(1, parent.expand_as(paths))


class _Solver:
    """Finds codes and scales. Weights have shape (columns, rows), columns sorted and divided by their steps.

    `factor` is the upper Cholesky factor of the inverse of `matrix`.
    """

    def __init__(self, target: torch.Tensor, matrix: torch.Tensor, factor: torch.Tensor, bits: int, quick: bool):
        self._target, self._matrix, self._factor, self._bits = target, matrix, factor, bits
        self._top = 2**bits - 1
        self._paths = 1 if quick else min(max(PATH_COLUMNS // len(target), LEAST_PATHS), MOST_PATHS)

    def solve(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes, float32 of shape (columns, rows), and scales, (rows,), which bfloat16 holds exactly."""
        codes, scales = self._try_scales()
        if self._paths > 1:
            codes = self._improve(codes, scales)
        for _ in range(SWEEPS):
            before = codes.clone()
            scales = self._fitted(codes, scales)
            self._descend(codes, scales)
            if torch.equal(before, codes):
                break
        return codes, self._fitted(codes, scales)

    def _in_codes(self, target: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return weights in units of codes, so that the nearest integer is the code of the nearest level."""
        return target * _inverse(2 * scales) + self._top / 2

    def _try_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._target.shape[1]
        usual = USUAL[self._bits] * self._target.square().mean(dim=0).sqrt()
        count = min(max(TRIED_COLUMNS // len(self._target), LEAST_TRIED), MOST_TRIED)
        tried = torch.linspace(LOWEST, HIGHEST, count, device=usual.device)
        scales = (tried[:, None] * usual).to(torch.bfloat16).float()
        best = torch.full_like(usual, torch.inf)
        found, codes = torch.zeros_like(usual), torch.zeros_like(self._target)
        for some in scales.split(max(1, CHUNK // rows)):
            new, errors = self._feed_back(self._in_codes(self._target.repeat(1, len(some)), some.flatten()))
            errors = errors.view_as(some) * some.square()
            for own, error, scale in zip(new.view(-1, len(some), rows).unbind(1), errors, some):
                better = error < best
                best, found = torch.where(better, error, best), torch.where(better, scale, found)
                codes = torch.where(better, own, codes)
        return codes, found

    def _feed_back(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes for weights in units of codes, in place, and the error of each row."""
        own, errors = self._factor.diagonal().tolist(), torch.zeros_like(values[0])
        for start in range(0, len(values), BLOCK):
            block, factor = values[start : start + BLOCK], self._factor[start : start + BLOCK, start:]
            lost = torch.empty_like(block)
            for column, value in enumerate(block):
                code = value.round().clamp_(0, self._top)
                torch.sub(value, code, out=lost[column]).div_(own[start + column])
                block[column + 1 :].addr_(factor[column, column + 1 : len(block)], lost[column], alpha=-1)
                value.copy_(code)
            values[start + BLOCK :].addmm_(factor[:, BLOCK:].T, lost, alpha=-1)
            errors += lost.square_().sum(dim=0)
        return values, errors

    def _improve(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return, for each row, the better of its codes and those that `_search` finds."""
        rows, better = max(1, CHUNK // self._paths), []
        for target, old, own in zip(self._target.split(rows, dim=1), codes.split(rows, dim=1), scales.split(rows)):
            values = self._in_codes(target, own)
            lost = values - old
            found, error = self._search(values)
            better.append(torch.where(error < ((self._matrix @ lost) * lost).sum(dim=0), found, old))
        return torch.cat(better, dim=1)

    def _search(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and errors like `_feed_back`, by a beam search: paths branch into their two nearest codes."""
        count, (columns, rows) = self._paths, values.shape
        own, paths = self._factor.diagonal().tolist(), values[:, None].repeat(1, count, 1)
        errors = values.new_full((count, rows), torch.inf)
        errors[0] = 0
        for start in range(0, columns, SEARCHED):
            end = min(start + SEARCHED, columns)
            block, factor = paths[start:end].clone(), self._factor[start:end, start:]
            lost, origin = torch.zeros_like(block), torch.arange(count, device=values.device)[:, None].repeat(1, rows)
            for column in range(len(block)):
                value = block[column]
                first = value.round().clamp_(0, self._top)
                second = first + torch.where(value > first, 1, -1)
                code = torch.cat([first, second])
                error = (value.repeat(2, 1) - code).div_(own[start + column])
                total = (errors.repeat(2, 1) + error.square()).masked_fill_((code < 0) | (code > self._top), torch.inf)
                errors, place = total.topk(count, dim=0, largest=False)
                parent = place % count
                block, lost, origin = _follow(block, parent), _follow(lost, parent), origin.gather(0, parent)
                block[column], lost[column] = code.gather(0, place), error.gather(0, place)
                later = factor[column, column + 1 : len(block), None, None]
                block[column + 1 :] -= later * lost[column]
            paths = _follow(paths, origin)
            paths[start:end] = block
            paths[end:].flatten(1).addmm_(factor[:, len(block) :].T, lost.flatten(1), alpha=-1)
        return paths[:, 0], errors[0]  # topk sorts

    def _descend(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Move each code in turn, in place, to its best value given all others."""
        values, diagonal = self._in_codes(self._target, scales), self._matrix.diagonal().tolist()
        for start in range(0, len(codes), BLOCK):
            block, matrix = codes[start : start + BLOCK], self._matrix[start : start + BLOCK]
            left = matrix @ (values - codes)
            for column, code in enumerate(block):
                new = (code + left[column] / diagonal[start + column]).round_().clamp_(0, self._top)
                left[column + 1 :].addr_(matrix[column, start + column + 1 : start + len(block)], new - code, alpha=-1)
                code.copy_(new)

    def _fitted(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the best scales for the codes, which bfloat16 holds exactly."""
        levels = 2 * codes - self._top
        products = self._matrix @ levels
        gain, curvature = (products * self._target).sum(dim=0), (products * levels).sum(dim=0)
        fitted = (gain / curvature).clamp_(min=0).to(torch.bfloat16).float()
        better = (fitted - scales) * (curvature * (fitted + scales) - 2 * gain) < 0  # rounding may go too far
        return torch.where(better, fitted, scales)
