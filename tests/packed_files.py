"""A small packed checkpoint, for tests that read and damage it: with or without quantised values."""

import torch

from optimum_neuronal.checkpoint.coding import find_codings
from optimum_neuronal.checkpoint.packed_reading import open_checkpoint
from optimum_neuronal.checkpoint.weight_writers import PackedWriter
from optimum_neuronal.formats.coded import CodedWeight


FILE = "packed-00001-of-00001.safetensors"
NAME = "layers.0.up_proj.weight"
TRANSPOSED = "layers.0.down_proj.weight"
BITS = 3
SPARSITY_CONFIG = {
    "block_sparsity": {"layers.0": 0.7},
    "projections": {
        "up_proj": {"sparsity": 0.7, "weights": ["layers.*.up_proj.weight"]},
        "down_proj": {"sparsity": 0.7, "weights": ["layers.*.down_proj.weight"], "transposed": True},
    },
    "value_bits": BITS,
}


def tensors(size: float = 1.0) -> dict[str, torch.Tensor]:
    """What the checkpoint holds: two weights with many zeros and values of few bits, and two that are not packed.

    `size` is that of weights; those of 1 have short scales, those of 1000 do not.
    """
    generator = torch.Generator().manual_seed(0)
    weight = size * torch.randn(6, 5, generator=generator)
    weight[torch.rand(6, 5, generator=generator) < 0.7] = 0
    return {
        NAME: CodedWeight.nearest(weight.bfloat16(), BITS).unpack(),
        TRANSPOSED: CodedWeight.nearest(weight, BITS).unpack().T.contiguous(),
        "norm.weight": torch.randn(3, generator=generator),
        "steps": torch.tensor(7),
    }


def write(folder, max_shard_size="1GB", coded=False, size=1.0) -> None:
    """Writes it into a folder."""
    codings = find_codings(SPARSITY_CONFIG, tensors(size)) if coded else ()
    with PackedWriter(folder, max_shard_size, codings) as writer:
        for name, tensor in tensors(size).items():
            writer.add(name, tensor)


def read(folder) -> dict[str, torch.Tensor]:
    """Reads all of it, every check included."""
    return {name: weight[...] for file in open_checkpoint(folder) for name, weight in file.weights.items()}
