"""Weights with values of few bits that are made by hand: any codes, any scales, any mask."""

import torch

from optimum_neuronal.formats.code_stream import pack_codes
from optimum_neuronal.formats.codebooks import TABLES
from optimum_neuronal.formats.coded import GROUP, CodedWeight
from optimum_neuronal.formats.packed import PackedMask
from optimum_neuronal.formats.scale_grid import ScaleGrid
from optimum_neuronal.inference.coded_rows import CodedRows


def make_coded(out, columns, value_bits, density=0.4, dtype=torch.float32, seed=0, short=True) -> CodedWeight:
    """Random codes; every fifth row is empty, another fifth full; some groups keep nothing. Scales are `short` or not."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(out, columns, generator=generator) < density
    kept[1::5], kept[3::5] = False, True
    kept[::4, GROUP : 2 * GROUP] = False
    codes = torch.randint(1, 2**value_bits, (int(kept.sum()),), generator=generator, dtype=torch.uint8)
    if value_bits == 8:
        codes[codes == 128] = 127
    groups = -(-columns // GROUP)
    used = torch.nn.functional.pad(kept, (0, -columns % GROUP)).view(out, groups, GROUP).any(-1)
    scales = torch.rand(out, groups, generator=generator) / 50 + 0.001
    table = torch.tensor(TABLES[value_bits][0], dtype=torch.int8)
    mask = PackedMask.pack(kept)
    scales = torch.where(used, ScaleGrid(0.001, 0.1, short).nearest(scales), 0)
    return CodedWeight(mask, pack_codes(codes, kept, value_bits), scales, table, value_bits, dtype)


def coded_tensors(coded: CodedWeight) -> tuple[torch.Tensor, ...]:
    """Bits, codes, offsets, scales and table, as operations take them."""
    rows = CodedRows.of(coded)
    return rows.bits, rows.codes, rows.offsets, rows.scales, rows.table
