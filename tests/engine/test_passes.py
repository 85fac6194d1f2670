import pytest

from optimum_neuronal.engine.passes import CalibrationPass, Pass


class Trial(Pass):
    def runs(self, index, last):
        return self.plans, 0, 0


class Whole(CalibrationPass):
    def runs(self, index, last):
        return 1, 0, 0


@pytest.mark.parametrize("asked, counted", [(None, 4), (2, 2), (9, 4)])
def test_trials_are_on_the_alignment_sequences_at_most(asked, counted):
    assert Trial("trial", 3, sequences=asked).count_sequences(samples=100, alignment=4) == counted


def test_the_dense_models_own_pass_is_needed_where_trials_refer_to_it():
    assert Trial("trial", 3, "dense").needs_dense
    assert not Trial("trial", 3, "sparse-stream").needs_dense


def test_hidden_states_of_a_trial():
    """The first block's inputs, with the dense reference its last output; and every plan's stream around a block."""
    assert Trial("trial", 3, "sparse-stream").hidden_sequences(100, 4, deep=True) == 4 + 4 * 3 * 2
    assert Trial("trial", 3, "dense").hidden_sequences(100, 4, deep=True) == 2 * 4 + 4 * 3 * 2
    assert Trial("trial", 3, "dense").hidden_sequences(100, 4, deep=False) == 2 * 4 + 4 * 3
    assert Trial("trial", 0, "sparse-stream", sequences=2).hidden_sequences(100, 4, deep=True) == 4 + 2 * 2


def test_a_pass_over_all_calibration_sequences():
    whole = Whole("scores", 0)
    assert whole.count_sequences(samples=100, alignment=4) == 100 and not whole.needs_dense
    assert whole.hidden_sequences(samples=100, alignment=4, deep=True) == 200
