import pytest
from transformers import TrainerState

from optimum_neuronal.training.callbacks import Training


class Loop:
    """As a Trainer: holds a state, and runs a callback."""

    def __init__(self):
        self.state = TrainerState()

    def run(self, callback):
        callback(self.state)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_training_is_under_way_while_its_loop_runs(error):
    """Also when an error ends it, whose traceback holds the frames."""
    loop, seen = Loop(), []

    def callback(state):
        training = Training(state)
        seen.append(training)
        assert training.is_under_way() and training.is_of(state) and not training.is_of(TrainerState())
        if len(seen) == 2:
            raise error

    loop.run(callback)
    assert not seen[0].is_under_way()
    with pytest.raises(error):
        loop.run(callback)
    assert not seen[1].is_under_way()
    loop.state = TrainerState()
    loop.run(lambda state: seen.append(seen[0].is_under_way()))
    assert seen[2] is False, "another training of the same Trainer"


def test_without_a_trainer_it_goes_on():
    assert Training(TrainerState()).is_under_way() and Training(None).is_under_way()
