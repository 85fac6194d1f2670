"""Draws calibration sequences from the data of a training, without disturbing it."""

import random
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from ..common.torch_state import preserve_rng_state
from ..config.neuronal_config import NeuronALConfig
from ..data.token_windows import resolve_bos, resolve_seq_length, with_bos


def training_sequences(loader: DataLoader, config: NeuronALConfig, model_config) -> torch.Tensor:
    """Draw calibration sequences, int64, (num_samples, seq_length), on the CPU, equal in every process.

    Examples are drawn with the config's seed (streams without a length keep their order) and collated one by one. Their
    tokens, without padding, are joined and cut. Without `seq_length`, sequences are as long as the longest example. A BOS
    token, see [`resolve_bos`], begins every sequence and occurs nowhere else.
    """
    bos = resolve_bos(model_config, None, config.add_bos)
    added = int(bos is not None)
    allowed, length, pieces, count = resolve_seq_length(model_config, config.seq_length) - added, 1, [], 0
    with preserve_rng_state():
        for piece in _token_ids(loader, config.seed):
            piece = piece if bos is None else piece[piece != bos]
            pieces.append(piece)
            count += len(piece)
            length = allowed if config.seq_length is not None else min(allowed, max(length, len(piece)))
            if count >= config.num_samples * length:
                break
    if count < config.num_samples * length:
        raise ValueError(
            f"The training data holds {count} tokens, but {config.num_samples} calibration sequences of {length + added} need "
            f"{config.num_samples * length}: set num_samples to at most {count // length}, or a smaller seq_length."
        )
    return with_bos(torch.cat(pieces)[: config.num_samples * length].view(config.num_samples, length), bos)


def _token_ids(loader: DataLoader, seed: int) -> Iterator[torch.Tensor]:
    """Yield the token ids of the examples, int64, (tokens,), on the CPU, without padding."""
    dataset = examples = loader.dataset
    if hasattr(dataset, "__len__"):
        examples = (dataset[index] for index in random.Random(seed).sample(range(len(dataset)), len(dataset)))
    for example in examples:
        batch = loader.collate_fn([example])
        ids, used = batch["input_ids"], batch.get("attention_mask")
        used = torch.ones_like(ids) if used is None or used.shape != ids.shape else used
        yield ids[used.bool()].cpu().long()
