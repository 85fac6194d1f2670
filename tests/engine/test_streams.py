import torch

from optimum_neuronal.engine import streams
from optimum_neuronal.engine.streams import Stream, grouped, on_cpu, streams_bytes


FIRST, SECOND = torch.ones(2, 3, 4), torch.ones(1, 3, 4)  # 96 and 48 bytes


def test_sequences_are_those_of_all_batches():
    assert Stream([FIRST, SECOND]).sequences == 3
    assert [states is own for states, own in zip(Stream([FIRST, SECOND]), (FIRST, SECOND))] == [True, True]


def test_bytes_that_several_streams_share_count_once():
    one, other = Stream([FIRST, SECOND]), Stream([FIRST])
    assert streams_bytes([one, None, other, one]) == 96 + 48
    assert streams_bytes([None]) == 0


def test_streams_that_were_the_same_stay_so_in_cpu_memory(monkeypatch):
    moved = []
    monkeypatch.setattr(streams, "to_device", lambda states, device: moved.append(device.type) or states.clone())
    one, other = Stream([FIRST, SECOND]), Stream([SECOND])
    first, none, again, last = on_cpu([one, None, one, other])
    assert none is None and first is again and last is not first
    assert first.batches[1] is last.batches[0], "what two streams share is moved once"
    assert moved == ["cpu", "cpu"] and torch.equal(first.batches[0], FIRST)


def test_groups_are_of_the_same_stream_whatever_it_holds():
    one, alike = Stream([FIRST]), Stream([FIRST])
    assert grouped([one, alike, None, one], shared=False) == [[0, 3], [1]]
    assert grouped([one, alike, None, one], shared=True) == [[0, 1, 3]]
    assert grouped([None, None], shared=True) == []
