"""A small comparison, the same for all tests of comparing."""

import pytest


SMALL = {"num_samples": 6, "num_alignment_samples": 2}


@pytest.fixture
def others(ids):
    return {"dataset": ids[:6], "evaluate": {"test": ids[6:]}, "sparsities": [0.5], **SMALL}
