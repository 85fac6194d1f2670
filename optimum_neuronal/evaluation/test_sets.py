"""Several test sets at once, on which a model is measured before and after its weights change."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..data.token_windows import TokenWindows
from .perplexity import evaluate_perplexity, load_windows


TestWindows = Mapping[str, TokenWindows]  # by the name of the test set


def load_tests(tests: Mapping[str, Any], model: PreTrainedModel, tokenizer: Any, *how: Any) -> dict[str, TokenWindows]:
    """Return the windows of each test set; `how`: further arguments of [`load_windows`]."""
    return {name: load_windows(model.config, tokenizer, test, *how) for name, test in tests.items()}


def measure(model: PreTrainedModel, tests: TestWindows, batch_size: int | None = None) -> dict[str, float]:
    """Return the perplexity on each test set."""
    return {name: evaluate_perplexity(model, None, test, batch_size=batch_size) for name, test in tests.items()}


def report_tests(tests: TestWindows, **measured: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return what a report holds: test set -> its `window`, `bos`, and perplexities by when they were measured."""
    return {
        name: {"window": test.ids.shape[1], "bos": test.begin_with_bos}
        | {when: values[name] for when, values in measured.items() if name in values}
        for name, test in tests.items()
    }


def digest(tests: TestWindows) -> str:
    """Return a hash of names and token ids, for the name of a record."""
    parts = [[name, *test.ids.shape, test.sha256] for name, test in tests.items()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
