"""Sizes of packed weights by their shapes: in files, and in memory where they are computed with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..packed.formats.quantized import BYTE_BITS, quantized_bytes
from ..packed.formats.sparse import sparse_bytes, sparse_bytes_in_memory
from .projections import Decoder, Projection, token_weights


STEPS_FROM = 512  # rows of a quantized weight from which steps pay for their bits


def has_steps(rows: int, bits: int, shared: bool) -> bool:
    """Return True if a quantized weight gets a step per column. `shared`: an expert in one parameter with others."""
    return rows >= STEPS_FROM and bits < BYTE_BITS and not shared


@dataclass(frozen=True)
class PackedSize:
    """Bytes of pruned and low-bit weights. A weight that is not smaller when packed counts as dense."""

    dense: int
    saved: int  # in the packed format
    in_memory: int  # in packed modules, if all of them have a packed form
    weights: int  # number of weights

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight in the packed format: mask and values, or codes and scales."""
        return 8 * self.saved / self.weights


def packed_size(
    decoder: Decoder,
    zeros: Callable[[Projection], int],
    bits: Mapping[str, int] | None = None,
    embedding_bits: int | None = None,
    unties: bool = False,
) -> PackedSize:
    """Return the size of a decoder's pruned weights, and with `embedding_bits` of its model's embeddings and head.

    `zeros` counts a projection's zeros, `bits` maps projection names to the bits of their codes, and `unties` is True
    if the head will no longer share its weights. Weights are not read, and may be on the meta device.
    """
    owners, zeros_of, bits_of = {}, {}, {}
    for projection in decoder.projections.values():
        owner = projection.owner
        owners[id(owner)] = owner, projection.shape[1]
        zeros_of[id(owner)] = zeros_of.get(id(owner), 0) + zeros(projection)
        if bits is not None:
            bits_of[id(owner)] = bits[projection.name]
    dense = saved = in_memory = 0
    for key, (owner, columns) in owners.items():
        numel, itemsize = owner.numel(), owner.element_size()
        kept = numel - zeros_of[key]
        dense += numel * itemsize
        shape = (numel // columns, columns)
        if key in bits_of:
            stored = held = quantized_bytes(shape, bits_of[key], has_steps(shape[0], bits_of[key], owner.ndim > 2))
        else:
            stored = sparse_bytes(owner.shape, kept, itemsize)  # in the parameter's own layout
            held = sparse_bytes_in_memory(shape, kept, itemsize)
        saved += min(numel * itemsize, stored)
        in_memory += min(numel * itemsize, held)
    weights = sum(owner.numel() for owner, _ in owners.values())
    head = [] if embedding_bits is None else list(token_weights(decoder.model).values())
    for weight in [*head, *(head if unties else ())]:
        size = weight.numel() * weight.element_size()
        packed = min(size, quantized_bytes(weight.shape, embedding_bits))
        dense, saved, in_memory = dense + size, saved + packed, in_memory + packed
        weights += weight.numel()
    return PackedSize(dense, saved, in_memory, weights)
