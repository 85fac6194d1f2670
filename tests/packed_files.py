"""A small packed checkpoint, for tests that read and damage it."""

import torch

from optimum_neuronal.checkpoint.packed_index import open_checkpoint
from optimum_neuronal.checkpoint.packed_writing import PackedWriter


FILE = "packed-00001-of-00001.safetensors"
NAME = "layers.0.up_proj.weight"


def tensors() -> dict[str, torch.Tensor]:
    """What the checkpoint holds: two weights with many zeros, and two that are not packed."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 5, generator=generator)
    weight[torch.rand(6, 5, generator=generator) < 0.7] = 0
    return {
        NAME: weight.bfloat16(),
        "layers.0.down_proj.weight": weight.T.contiguous(),
        "norm.weight": torch.randn(3, generator=generator),
        "steps": torch.tensor(7),
    }


def write(folder, max_shard_size="1GB") -> None:
    """Writes it into a folder."""
    with PackedWriter(folder, max_shard_size) as writer:
        for name, tensor in tensors().items():
            writer.add(name, tensor)


def read(folder) -> dict[str, torch.Tensor]:
    """Reads all of it, every check included."""
    return {name: weight[...] for file in open_checkpoint(folder) for name, weight in file.weights.items()}
