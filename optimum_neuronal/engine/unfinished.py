"""Records of a sweep that is under way: the hidden states of every stream, and what was measured so far."""

from collections.abc import Mapping, Sequence

import torch
from transformers.utils import logging

from ..runtime.journal import Journal
from .calls import hidden_bytes


logger = logging.get_logger(__name__)

Hidden = list[torch.Tensor]  # one tensor of shape (batch, tokens, hidden size) per batch


def record_sweep(
    journal: Journal, name: str, blocks: int, streams: Sequence[Hidden], kept: Mapping[str, torch.Tensor]
) -> None:
    """Records a sweep after so many blocks. Does nothing if that cannot be done: the step then begins anew.

    Args:
        journal ([`Journal`]): where to.
        name (`str`): of the record.
        blocks (`int`): how many blocks the streams have been through.
        streams (`Sequence[Hidden]`): what the next block receives; equal tensors are recorded once.
        kept (`Mapping[str, Tensor]`): what was measured so far.
    """
    distinct = {id(states): states for stream in streams for states in stream}
    if any(getattr(states, "shared_contents", None) for states in distinct.values()):
        return  # what blocks hand to later blocks beside their output is not recorded
    if not journal.has_room(hidden_bytes(streams)):
        logger.warning_once("The disk is too full to record unfinished sweeps: finished steps and blocks are.")
        return
    places = {key: place for place, key in enumerate(distinct)}
    value = {"blocks": blocks, "streams": [[places[id(states)] for states in stream] for stream in streams]}
    hidden = {f"hidden {place}": distinct[key] for key, place in places.items()}
    journal.put(name, value, {**hidden, **{f"kept {key}": tensor for key, tensor in kept.items()}})


def recall_sweep(
    journal: Journal, name: str, beginning: Hidden
) -> tuple[int, list[Hidden], dict[str, torch.Tensor]] | None:
    """What [`record_sweep`] recorded: blocks, streams, what was measured. None if there is nothing of use.

    Args:
        journal ([`Journal`]), name (`str`): where it was recorded.
        beginning (`Hidden`): what the first block receives; a record with other batches is of no use.
    """
    found = journal.get(name)
    if found is None:
        return None
    value, tensors = found
    shapes = [states.shape for states in beginning]
    streams = [[tensors[f"hidden {place}"] for place in stream] for stream in value["streams"]]
    if any(stream and [states.shape for states in stream] != shapes for stream in streams):
        return None
    same: dict[tuple, Hidden] = {}  # streams that were one list are one again
    streams = [same.setdefault(tuple(map(id, stream)), stream) for stream in streams]
    return value["blocks"], streams, {key[5:]: tensor for key, tensor in tensors.items() if key.startswith("kept ")}
