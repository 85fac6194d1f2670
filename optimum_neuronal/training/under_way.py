"""Whether a training of transformers' `Trainer` is still under way, for callbacks, which are not told of every end."""

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType


class Training:
    """One training of a `Trainer`, which tells its callbacks of the end unless an error or Ctrl-C has ended it.

    So this looks for the loop among the functions that the thread is in, by the `TrainerState` that every training makes.

    Args:
        state (`TrainerState`, *optional*): what `on_train_begin` was given, for which this is made.
    """

    def __init__(self, state):
        self._state = None if state is None else weakref.ref(state)
        self._thread = threading.get_ident()
        self._loop = next((frame.f_code for frame in self._stack() if self._is_loop(frame)), None)

    def is_of(self, state) -> bool:
        """Whether the state is this training's."""
        return self._state is not None and self._state() is state

    def is_under_way(self) -> bool:
        """Whether it has not ended yet; of a callback that is not called by a Trainer, this is not known: True."""
        if self._loop is None:
            return True
        return any(frame.f_code is self._loop and self._is_loop(frame) for frame in self._stack())

    def _stack(self) -> Iterator[FrameType]:
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _is_loop(self, frame: FrameType) -> bool:
        if frame.f_code.co_varnames[:1] != ("self",):
            return False
        state = getattr(frame.f_locals.get("self"), "state", None)
        return state is not None and self.is_of(state)
