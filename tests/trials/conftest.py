import pytest
from sweeps import make_sweep

from optimum_neuronal.blocks.block_inputs import inference


@pytest.fixture
def sweep(llama, ids):
    """A sweep over all projections of a Llama that is ready for inference."""
    with inference(llama):
        yield make_sweep(llama, ids)
