"""How far a run over the blocks has come: what it has measured, and the hidden states that the next block receives.

An interrupted run goes on from the last record of it.
"""

import time

import torch

from ..files.journal import Journal
from ..system.notes import get_logger
from .streams import Stream, Streams, streams_bytes


logger = get_logger(__name__)

RECORD_EVERY = 60.0  # seconds between two records of an unfinished run

Key = tuple[str | int, ...]  # what a measurement is of: ("error", candidate, block)


class UnfinishedRun:
    """What a run measures, recorded now and then if it has a name.

    Args:
        journal ([`Journal`], *optional*): where to.
        name (`str`): of the record; nothing is recorded without one.

    Attributes:
        measured (`dict[tuple, Tensor]`): filled by the run.
    """

    def __init__(self, journal: Journal | None = None, name: str = ""):
        self.measured: dict[Key, torch.Tensor] = {}
        self._journal, self._name = journal or Journal(), name
        self._recorded_at = time.monotonic()

    def recall(self, beginning: Stream) -> tuple[int, Streams] | None:
        """How many blocks were visited, and the streams behind them; None if there is no record of use.

        Args:
            beginning ([`Stream`]): what the first block receives; a record with other batches is of no use.
        """
        found = self._journal.get(self._name) if self._name else None
        if found is None:
            return None
        value, tensors = found
        streams = [
            place if place is None else [tensors[f"hidden {key}"] for key in place] for place in value["streams"]
        ]
        shapes = [states.shape for states in beginning]
        if any(batches is not None and [states.shape for states in batches] != shapes for batches in streams):
            return None
        self.measured.update({tuple(key): tensors[f"measured {place}"] for place, key in enumerate(value["measured"])})
        same: dict[tuple[int, ...], Stream] = {}  # streams that were the same are so again
        places = [place and tuple(place) for place in value["streams"]]
        return value["blocks"], [
            place if place is None else same.setdefault(place, Stream(batches))
            for place, batches in zip(places, streams)
        ]

    def note(self, blocks: int, streams: Streams) -> None:
        """Records a run after so many blocks, if the last record is old enough and the disk has room."""
        due = time.monotonic() - self._recorded_at > RECORD_EVERY
        if not (self._name and self._journal.keeps and due):
            return
        distinct = list(dict.fromkeys(states for stream in streams if stream is not None for states in stream))
        if any(getattr(states, "shared_contents", None) for states in distinct):
            return  # what blocks hand to later blocks beside their output is not recorded
        if not self._journal.has_room(streams_bytes(streams)):
            logger.warning_once("The disk is too full to record unfinished sweeps: finished steps and blocks are.")
            return
        places = {states: place for place, states in enumerate(distinct)}
        value = {
            "blocks": blocks,
            "streams": [None if stream is None else [places[states] for states in stream] for stream in streams],
            "measured": list(self.measured),
        }
        tensors = {f"hidden {place}": states for states, place in places.items()}
        tensors |= {f"measured {place}": tensor for place, tensor in enumerate(self.measured.values())}
        self._journal.put(self._name, value, tensors)
        self._recorded_at = time.monotonic()
