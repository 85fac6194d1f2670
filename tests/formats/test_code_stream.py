import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from optimum_neuronal.formats.code_stream import BLOCK, pack_codes, stream_bytes, unpack_codes


def kept_and_codes(shape, bits, density=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator) < density
    return kept, torch.randint(2**bits, (int(kept.sum()),), generator=generator).to(torch.uint8)


def test_three_bits_by_hand():
    """Columns 0, 2, 63 are a word, 64 begins the next, and so does the row behind it."""
    kept = torch.zeros(2, 65, dtype=torch.bool)
    kept[0, [0, 2, 63, 64]] = True
    kept[1, 1] = True
    codes = torch.tensor([0b101, 0b110, 0b011, 0b111, 0b001], dtype=torch.uint8)
    stream = pack_codes(codes, kept, 3)
    assert stream.tolist() == [0b11110101, 0b0, 0b111, 0b001]
    assert torch.equal(unpack_codes(stream, kept, 3), codes)


SHAPES = [(1, 1), (3, 64), (5, 63), (2, 65), (7, 200), (4, 1), (0, 9), (3, 0)]


@examples(25)
@given(shape=st.sampled_from(SHAPES), density=st.sampled_from([0, 0.4, 1]))
def test_codes_come_back(shape, density):
    for bits in [2, 3, 4, 8]:
        kept, codes = kept_and_codes(shape, bits, density)
        stream = pack_codes(codes, kept, bits)
        assert len(stream) == stream_bytes(kept, bits) and stream.dtype == torch.uint8
        assert torch.equal(unpack_codes(stream, kept, bits), codes)


def test_codes_come_back_in_pieces():
    kept, codes = kept_and_codes((9, BLOCK // 4 + 3), 3)
    stream = pack_codes(codes, kept, 3)
    assert torch.equal(unpack_codes(stream, kept, 3), codes)
    whole = [pack_codes(codes[kept[:row].sum() : kept[: row + 1].sum()], kept[row : row + 1], 3) for row in range(9)]
    assert torch.equal(stream, torch.cat(whole))


def test_damage_between_codes_is_found():
    kept, codes = kept_and_codes((1, 3), 3, density=1)  # 9 bits: 7 behind them
    stream = pack_codes(codes, kept, 3)
    for bit in range(1, 8):
        damaged = stream.clone()
        damaged[1] |= 1 << bit
        with pytest.raises(ValueError, match="bits set between"):
            unpack_codes(damaged, kept, 3)
    for other in (stream[:1], torch.cat((stream, stream))):
        with pytest.raises(ValueError, match="expected 2 for what its bitmask keeps"):
            unpack_codes(other, kept, 3)
