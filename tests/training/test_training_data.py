import random

import datasets
import numpy as np
import pytest
import torch
from conftest import make_model
from torch.utils.data import DataLoader

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.training.neuronal_callback import training_sequences


ROWS = torch.arange(40).view(10, 4)


def sequences(dataset, collate_fn=None, model_config=None, shuffle=True, **fields):
    fields = {"num_samples": 4, "num_alignment_samples": 1, "topup": "uniform", "saliency": "wanda", **fields}
    loader = DataLoader(dataset, batch_size=3, shuffle=shuffle, collate_fn=collate_fn)
    return training_sequences(loader, NeuronALConfig(0.5, **fields), model_config or make_model("llama").config)


def padded(examples):
    """To eight tokens, as a tokenizer pads, after a random augmentation."""
    random.random(), np.random.rand(), torch.rand(1)
    ids = torch.zeros(len(examples), 8, dtype=torch.int64)
    for row, example in zip(ids, examples):
        row[: len(example)] = torch.tensor(example)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def test_examples_of_equal_length_are_taken_whole():
    data = [{"input_ids": row} for row in ROWS]
    drawn = sequences(data)
    assert drawn.dtype == torch.int64 and drawn.shape == (4, 4)
    assert {tuple(row) for row in drawn.tolist()} <= {tuple(row) for row in ROWS.tolist()}
    assert torch.equal(drawn, sequences(data)) and not torch.equal(drawn, sequences(data, seed=1))
    assert torch.equal(sequences(data, num_samples=2, seq_length=8).flatten(), drawn.flatten())


def test_the_bos_token_begins_every_sequence_and_nothing_else():
    """Gemma's is 2 here; examples of one to six tokens begin with it, too."""
    model_config = make_model("gemma").config
    model_config.bos_token_id = 2
    examples = [[2, *range(10 * i + 3, 10 * i + 4 + i)] for i in range(6)]
    drawn = sequences(examples, padded, model_config, num_samples=3, seq_length=5)
    assert drawn.shape == (3, 5) and (drawn[:, 0] == 2).all() and (drawn[:, 1:] != 2).all()
    plain = sequences(examples, padded, model_config, num_samples=3, seq_length=5, add_bos=False)
    assert not (plain[:, 0] == 2).all()


def test_others_are_joined_without_padding_and_randomness_is_untouched():
    examples = [list(range(10 * i + 1, 10 * i + 2 + i)) for i in range(6)]  # 1 to 6 tokens
    model_config = make_model("llama").config  # which draws weights
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    drawn = sequences(examples, padded, model_config, num_samples=3, seq_length=5)
    order = random.Random(0).sample(range(6), 6)
    assert drawn.flatten().tolist() == [token for index in order for token in examples[index]][:15]
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert sequences(examples, padded, num_samples=3).shape == (3, max(len(examples[index]) for index in order[:4]))


def test_streams():
    stream = datasets.Dataset.from_dict({"input_ids": ROWS.tolist()}).with_format("torch").to_iterable_dataset()
    assert torch.equal(sequences(stream, shuffle=False, num_samples=2), ROWS[:2])


def test_what_cannot_serve():
    data = [{"input_ids": row} for row in ROWS]
    with pytest.raises(ValueError, match="holds 40 tokens, but 11 .* of 4 need 44: set num_samples to at most 10"):
        sequences(data, num_samples=11)
    with pytest.raises(ValueError, match="Sequences of 65 tokens do not fit: this model allows 2 to 64"):
        sequences(data, seq_length=65)
