"""What is trained on, and how: the same for all tests of training with `Trainer`."""

import pytest
import torch
from transformers import TrainingArguments


@pytest.fixture
def data():
    ids = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def make_arguments(folder, **fields) -> TrainingArguments:
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 100}
    short = {"save_strategy": "no", "weight_decay": 0.1}
    return TrainingArguments(str(folder), **{**quiet, **short, **fields})
