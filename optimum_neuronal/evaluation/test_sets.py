"""Several test sets at once, which a model is measured on before and after its weights change."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .perplexity import begin_with_bos, evaluate_perplexity, load_windows


@dataclass(frozen=True)
class TestSets:
    """Windows of token ids by the name of the test set, int64 of shape (windows, seq_length)."""

    windows: dict[str, torch.Tensor]

    @classmethod
    def load(
        cls,
        tests: Mapping[str, Any],
        model: PreTrainedModel,
        tokenizer: Any,
        seq_length: int | None = None,
        add_bos: bool | None = None,
    ) -> "TestSets":
        """Return the windows of test sets by name, see [`load_windows`]."""
        sizes = {"seq_length": seq_length, "add_bos": add_bos}
        return cls({name: load_windows(model.config, tokenizer, test, **sizes) for name, test in tests.items()})

    def measure(self, model: PreTrainedModel, batch_size: int | None = None) -> dict[str, float]:
        """Return the perplexity on each test set."""
        return {
            name: evaluate_perplexity(model, None, ids, batch_size=batch_size) for name, ids in self.windows.items()
        }

    def report(self, tokenizer: Any, **measured: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """Return what a report holds: test set -> its `window`, `bos`, and perplexities by when they were measured."""
        return {
            name: {"window": ids.shape[1], "bos": begin_with_bos(ids, tokenizer)}
            | {when: values[name] for when, values in measured.items() if name in values}
            for name, ids in self.windows.items()
        }

    @property
    def digest(self) -> str:
        """A hash of names and token ids, for the name of a record."""
        digest = hashlib.sha256(json.dumps([[name, *ids.shape] for name, ids in self.windows.items()]).encode())
        for ids in self.windows.values():
            digest.update(ids.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]
