import pytest
from trial_helpers import make_evaluator

from optimum_neuronal.common.torch_state import inference


@pytest.fixture
def evaluator(llama, ids):
    """PlanEvaluator over all projections of a Llama that is ready for inference."""
    with inference(llama):
        yield make_evaluator(llama, ids)
