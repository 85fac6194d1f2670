import pytest
from trial_helpers import make_trials

from optimum_neuronal.blocks.block_inputs import inference


@pytest.fixture
def trials(llama, ids):
    """Trials over all projections of a Llama that is ready for inference."""
    with inference(llama):
        yield make_trials(llama, ids)
