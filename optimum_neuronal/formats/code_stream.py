"""The bit stream that few-bit codes lie in: row after row, of every 64 columns the codes of the kept ones.

Codes of a word of the mask, 64 columns of a row, follow each other from the lowest bit of a byte on, and fill a whole
number of bytes, the last with zeros. So a kernel finds the codes of a word by counting the bits of the mask alone.
"""

from collections.abc import Iterator

import torch

from .bitmask import ALIGNMENT
from .packed import PackedMask


BLOCK = 2**18  # elements at a time, so that the temporaries, eight bytes for each, stay small


def pack_codes(codes: torch.Tensor, kept: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes into their bit stream.

    Args:
        codes (`Tensor`): uint8, shape (kept,), below 2**bits: of the kept elements in row-major order.
        kept (`Tensor`): boolean, shape (rows, columns).
        bits (`int`): of each code.

    Returns:
        `Tensor`: uint8, shape (bytes,).
    """
    if bits == 8:
        return codes
    pieces, first = [], 0
    for block in _blocks(kept):
        counts, places = _word_bytes(block, bits), _places(block, bits)
        stream = torch.zeros(8 * int(counts.sum()), dtype=torch.bool, device=codes.device)
        piece = codes[first : first + len(places)]
        for bit in range(bits):
            stream[places + bit] = (piece >> bit & 1).bool()
        pieces.append(PackedMask.pack(stream).bits)
        first += len(places)
    return torch.cat(pieces) if pieces else codes


def unpack_codes(stream: torch.Tensor, kept: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes that [`pack_codes`] packed, shape (kept,).

    Raises:
        `ValueError`: the stream is not as long as the mask says, or has bits set between codes.
    """
    lengths = [_word_bytes(block, bits) for block in _blocks(kept)]
    expected = sum(int(length.sum()) for length in lengths)
    if len(stream) != expected:
        raise ValueError(f"its codes take {len(stream)} bytes: expected {expected} for what its bitmask keeps")
    if bits == 8:
        return stream
    pieces, first = [], 0
    for block, length in zip(_blocks(kept), lengths):
        size = int(length.sum())
        piece = stream[first : first + size]
        _check_padding(piece, block, length, bits)
        places = _places(block, bits)
        wide = torch.nn.functional.pad(piece, (0, 1)).to(torch.int16)  # so that a code may reach into the next byte
        byte = places >> 3
        pieces.append(((wide[byte] | wide[byte + 1] << 8) >> (places & 7) & 2**bits - 1).to(torch.uint8))
        first += size
    return torch.cat(pieces) if pieces else stream


def stream_bytes(kept: torch.Tensor, bits: int) -> int:
    """Bytes that the codes of these elements take, boolean of shape (rows, columns)."""
    return sum(int(_word_bytes(block, bits).sum()) for block in _blocks(kept))


def _blocks(kept: torch.Tensor) -> Iterator[torch.Tensor]:
    """Some rows at a time."""
    return iter(kept.split(max(1, BLOCK // max(1, kept.shape[1])))) if kept.numel() else iter(())


def _words(kept: torch.Tensor) -> torch.Tensor:
    """The mask by words: shape (rows, words, 64), False behind the last column."""
    padded = torch.nn.functional.pad(kept, (0, -kept.shape[1] % ALIGNMENT))
    return padded.view(len(kept), -1, ALIGNMENT)


def _word_bytes(kept: torch.Tensor, bits: int) -> torch.Tensor:
    """Of every word how many bytes its codes take, in row-major order."""
    return (_words(kept).sum(-1).flatten() * bits + 7) >> 3


def _places(kept: torch.Tensor, bits: int) -> torch.Tensor:
    """Of every kept element the bit at which its code begins, in row-major order."""
    words = _words(kept)
    length = _word_bytes(kept, bits)
    starts = ((length.cumsum(0) - length) << 3).view(*words.shape[:2], 1)
    return (starts + (words.cumsum(-1) - 1) * bits)[words]


def _check_padding(stream: torch.Tensor, kept: torch.Tensor, length: torch.Tensor, bits: int) -> None:
    used = _words(kept).sum(-1).flatten() * bits & 7
    last = stream[(length.cumsum(0) - 1)[used > 0]]
    if (last >> used[used > 0].to(torch.uint8)).any():
        raise ValueError("its codes have bits set between those of two words, which are to be 0")
