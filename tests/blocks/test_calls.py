import torch

from optimum_neuronal.blocks import block_inputs as module
from optimum_neuronal.blocks.block_inputs import (
    Call,
    Stream,
    grouped,
    keep_shared,
    on_cpu,
    restore_shared,
)


HIDDEN = torch.ones(1, 2, 3)


def test_every_stream_has_contents_of_its_own():
    """Two streams go through a block that adds to a container, one after the other."""
    container = {"first": 0}
    call = Call((), {"shared": container, "position": 3})
    streams = [torch.zeros(1), torch.zeros(1)]
    for stream in streams:
        keep_shared(stream, stream, call)
    behind = []
    for number, stream in enumerate(streams):
        restore_shared(stream, call)
        assert container == {"first": 0}
        container["second"] = number
        behind.append(torch.ones(1))
        keep_shared(behind[-1], stream, call)
    for number, stream in enumerate(behind):
        restore_shared(stream, call)
        assert container == {"first": 0, "second": number}


FIRST, SECOND = torch.ones(2, 3, 4), torch.ones(1, 3, 4)  # 96 and 48 bytes


def test_streams_that_were_the_same_stay_so_in_cpu_memory(monkeypatch):
    moved = []
    monkeypatch.setattr(module, "to_device", lambda states, device: moved.append(device.type) or states.clone())
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
