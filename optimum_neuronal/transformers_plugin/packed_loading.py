"""Loads packed checkpoints (docs/format.md) through transformers' `from_pretrained`, into plain models.

transformers lets a quantizer unpack weights by a conversion of the tensors that it has read. This is not used: its
interface differs between the supported releases, every family's own conversions (of experts) would need it, and tensors
are read ahead without bound, so that packed and unpacked weights would lie in memory together. Instead transformers
reads files that look dense, see [`PackedFile`], and treats the checkpoint as a dense one.

transformers reads files by a function that it holds in a global name, and has no hook around the reading. So that name
is replaced during loads, and restored by the last one, also if it fails.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.names import PACKED_INDEX, SUFFIX
from ..checkpoint.packed_reading import PackedFile, check_shapes, open_checkpoint, read_index
from ..checkpoint.safe_files import check_config_file
from ..checkpoint.save_pretrained import save_packed_by_default
from ..checkpoint.sparsity_config import KEY, read_sparsity_config
from ..checkpoint.stored_format import QUANTIZATION_CONFIG, check_agreement, check_packed, dense_config
from ..compat import transformers as internals


class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed checkpoint, see docs/format.md."""

    def __init__(self):
        super().__init__(quant_method="neuronal")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """Return the config, or raise `ValueError` for a format or a version that this package does not know."""
        check_packed(config_dict)
        return (cls(), kwargs) if return_unused_kwargs else cls()

    def to_dict(self) -> dict[str, Any]:
        return dict(QUANTIZATION_CONFIG)


class _ComparedName(str):
    """The name of a class; a comparison with another class's name raises an error that says what to do.

    transformers has no hook for a `quantization_config` passed for a checkpoint that has one: if the names of the two
    classes differ (`AutoHfQuantizer.merge_quantization_configs`), it raises an error that does not say what to do.
    """

    def __ne__(self, other: object) -> bool:
        if isinstance(other, str) and str(self) != str(other):
            raise ValueError(_advice(other))
        return super().__ne__(other)


PackedConfig.__name__ = _ComparedName(PackedConfig.__name__)


def _advice(passed: str) -> str:
    """Return the message for a config of a class of this name, passed for a packed checkpoint."""
    if passed == "NeuronALConfig":
        return (
            "The checkpoint is sparse already, and packed: load the dense one; or, to prune it further, load it without "
            "quantization_config, del model.config.sparsity_config, and call NeuronALPruner(config).prune(model)."
        )
    return (
        f"The checkpoint is packed, so that it cannot be loaded with another quantization_config (a {passed}). Convert it "
        "first, with `optimum-cli neuronal convert DIR --format dense --output DENSE_DIR`, and load DENSE_DIR with it."
    )


class PackedQuantizer(internals.EarlyQuantizer):
    """The quantizer that transformers calls while it loads a packed checkpoint. The loaded model is not quantized."""

    def __init__(self, quantization_config: PackedConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError("The checkpoint is not packed: load it without quantization_config=PackedConfig().")

    def see_config(self, config: PreTrainedConfig) -> None:
        """Set the file that transformers looks for, and check that it and the files that it names may be opened."""
        check_agreement(read_sparsity_config(config), "packed")
        internals.look_for_weights(config, PACKED_INDEX)
        index = Path(config.name_or_path or "", PACKED_INDEX)
        if os.path.lexists(index):  # else in a subfolder, or on the Hub
            check_config_file(index.parent)
            read_index(index)

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str], **_) -> None:
        """Check all headers before a weight is read, and let transformers read the files by [`PackedFile`]."""
        folder = Path(checkpoint_files[0]).parent
        check_config_file(folder)
        files = open_checkpoint(folder)
        check_shapes(files, model.state_dict())
        self._opening = PackedOpening(self.readers(files), owner=self)
        checkpoint_files[:] = self._opening.paths

    def readers(self, files: list[PackedFile]) -> list[Any]:
        """Return the objects by which transformers reads the files."""
        return files

    def postprocess_model(self, model: PreTrainedModel, **_) -> PreTrainedModel:
        """Leave nothing of the loading on the model, except that `save_pretrained` writes a packed checkpoint."""
        self._opening.end()
        if not self._opening.is_complete:
            raise RuntimeError(
                "This release of transformers reads checkpoints in a new way, which is not supported yet."
            )
        internals.forget_quantization(model)
        if getattr(model.config, KEY, None):  # shared with the model's parts, which save themselves dense
            setattr(model.config, KEY, dense_config({KEY: getattr(model.config, KEY)})[KEY])
        save_packed_by_default(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class PackedOpening:
    """One load, from when its files are known until all of them were opened, or the load has ended.

    transformers has no hook for a load that fails. So the load ends when the last file is opened, by
    [`~PackedOpening.end`], or when its owner is no longer in use.

    Args:
        files (`list`): readers of the checkpoint's files.
        owner: an object that lives as long as the load: the quantizer.

    Attributes:
        paths (`list[str]`): for transformers, in place of the files' own.
    """

    def __init__(self, files: list[Any], owner: object):
        self.paths = [_PackedPath(file, self) for file in files]
        self._unopened = set(files)
        _under_way.add(self)
        weakref.finalize(owner, _under_way.discard, self).atexit = False

    @property
    def is_complete(self) -> bool:
        """True if every file has been opened."""
        return not self._unopened

    def opened(self, file: Any) -> None:
        """Note that a file was opened."""
        self._unopened.discard(file)
        if self.is_complete:
            self.end()

    def end(self) -> None:
        """End the load, if it has not ended."""
        _under_way.discard(self)


class _PackedPath(str):
    """The path of a packed file, for [`_Opener`] alone: any other function finds no file of this name."""

    file: Any
    opening: PackedOpening

    def __new__(cls, file: Any, opening: PackedOpening):
        hint = f"{file.path} (packed: only to be read memory-mapped, without disable_mmap=True){SUFFIX}"
        path = super().__new__(cls, hint)
        path.file, path.opening = file, opening
        return path


class _Opener:
    """A function that opens packed files, and all others by the function that transformers had before.

    It keeps that function, so that an opener that other code has wrapped still works after the loads.
    """

    def __init__(self, before: Callable):
        self.before = before

    def __call__(self, path: str | os.PathLike, *args, **kwargs):
        if not isinstance(path, _PackedPath):
            return self.before(path, *args, **kwargs)
        path.opening.opened(path.file)
        return path.file


class _UnderWay:
    """The loads of this process, in all threads, whose files are not all open.

    The first load sets the opener, the last one restores transformers' own. A finalizer may call
    [`~_UnderWay.discard`] at any line of the same thread, hence a reentrant lock, and an order of lines that allows it.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._loads: set[PackedOpening] = set()
        self._opener: _Opener | None = None

    def add(self, load: PackedOpening) -> None:
        with self._lock:
            self._loads.add(load)
            if self._opener is None:
                before = internals.get_file_opener()
                if isinstance(before, _Opener):  # other code had wrapped an earlier one and restored it
                    before = before.before
                self._opener = _Opener(before)
                internals.set_file_opener(self._opener)

    def discard(self, load: PackedOpening) -> None:
        """Restore the function that the first load found, unless other code has replaced the opener since."""
        with self._lock:
            self._loads.discard(load)
            if self._loads or self._opener is None:
                return
            opener, self._opener = self._opener, None
            if internals.get_file_opener() is opener:
                internals.set_file_opener(opener.before)


_under_way = _UnderWay()


_activations: ContextVar[str | None] = ContextVar("activations of weights that stay packed", default=None)


@contextmanager
def keeping_packed(activations: str = "int8") -> Iterator[None]:
    """Keep packed the packed checkpoints that this thread loads while the context lasts.

    transformers has no argument for it: it refuses a `quantization_config` for a checkpoint with its own.

    Args:
        activations (`str`): format of the inputs of quantised values: `"int8"` or `"bf16"`.
    """
    token = _activations.set(activations)
    try:
        yield
    finally:
        _activations.reset(token)


def kept_activations() -> str | None:
    """Return the context's activations, None outside of it. Threads that read files are outside: ask before they begin."""
    return _activations.get()
