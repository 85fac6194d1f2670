"""A small comparison, the same for all tests of comparing."""

import pytest

from optimum_neuronal.saliency import alps


SMALL = {"num_samples": 6, "num_alignment_samples": 2}


@pytest.fixture
def others(ids):
    return {"dataset": ids[:6], "evaluate": {"test": ids[6:]}, "sparsities": [0.5], **SMALL}


@pytest.fixture
def quick_alps(monkeypatch):
    """ALPS looks for its supports in a few iterations instead of many."""
    original = alps.find_support
    monkeypatch.setattr(alps, "find_support", lambda *args: original(*args[:-1], min(args[-1], 6)))
