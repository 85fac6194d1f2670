from optimum_neuronal.common import clock
from optimum_neuronal.common.clock import Clock


def test_every_phase_lasts_from_the_end_of_the_one_before(monkeypatch):
    moments = iter([100.0, 102.5, 103.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(moments))
    timed = Clock()
    assert timed.seconds == {}, "no phase has ended"
    timed.lap("allocation")
    timed.lap("pruning")
    assert timed.seconds == {"allocation": 2.5, "pruning": 0.5}
