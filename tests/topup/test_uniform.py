from types import SimpleNamespace

from by_hand import make_block

from optimum_neuronal.topup.uniform import Uniform


def test_every_projection_gets_what_was_asked_for_and_nothing_is_asked():
    decoder = SimpleNamespace(projections=make_block([[1.0]], [[1.0, 2.0]]).projections)
    allocation = Uniform().allocate(SimpleNamespace(decoder=decoder), 0.7)
    assert allocation.plan.sparsity == {"block.0": 0.7, "block.1": 0.7} and allocation.decisions == {}
