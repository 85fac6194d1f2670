"""Loads packed checkpoints (docs/format.md) through transformers' `from_pretrained`, into plain models.

transformers lets a quantizer unpack weights by a conversion of the tensors that it has read. This is not used: its
interface differs between the supported releases, every family's own conversions (of experts) would need it, and tensors
are read ahead without bound, so that packed and unpacked weights would lie in memory together. Instead transformers
reads files that look dense, see [`PackedFile`], and treats the checkpoint as a dense one.

transformers reads files by a function that it holds in a global name, and has no hook around the reading. So while
packed files are loaded that function is replaced by one that opens them, and leaves all others to the function that was
there. It is put back when the last of these loads ends or fails.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import RLock
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.names import PACKED_INDEX, SUFFIX
from ..checkpoint.packed_reading import PackedFile, check_fit, open_checkpoint, read_packed_index
from ..checkpoint.safe_files import check_config, check_config_file
from ..checkpoint.save_pretrained import save_packed_by_default
from ..checkpoint.sparsity_config import KEY, read_sparsity_config
from ..checkpoint.stored_format import QUANTIZATION_CONFIG, check_agreement, check_packed, dense_config
from ..compat import hf_private


class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed checkpoint, see docs/format.md."""

    def __init__(self, quantized: bool = False):
        super().__init__(quant_method="neuronal")
        self.quantized = quantized  # some weights are of few bits

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """Return the config, or raise `ValueError` for a format or a version that this package does not know."""
        check_packed(config_dict)
        config = cls(config_dict.get("quantized") is True)
        return (config, kwargs) if return_unused_kwargs else config

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


_LOCK = RLock()  # a finalizer may run while it is held
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


class PackedQuantizer(hf_private.EarlyQuantizer):
    """The quantizer that transformers calls while it loads a packed checkpoint. The loaded model is not quantized."""

    def __init__(self, quantization_config: PackedConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError("The checkpoint is not packed: load it without quantization_config=PackedConfig().")

    def see_config(self, config: PreTrainedConfig) -> None:
        """Set the file that transformers looks for, and check that it and the files that it names may be opened."""
        check_config(config)
        check_agreement(read_sparsity_config(config), "packed")
        hf_private.look_for_weights(config, PACKED_INDEX)
        index = Path(config.name_or_path or "", PACKED_INDEX)
        if os.path.lexists(index):  # else in a subfolder, or on the Hub
            check_config_file(index.parent)
            read_packed_index(index.parent)

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str], **_) -> None:
        """Check all headers before a weight is read, and let transformers read the files by [`PackedFile`]."""
        folder = Path(checkpoint_files[0]).parent
        check_config_file(folder)
        files = open_checkpoint(folder)
        check_fit([weight for file in files for weight in file.weights.values()], model.state_dict())
        self._paths = [_PackedPath(file) for file in self.readers(model, files)]
        checkpoint_files[:] = self._paths
        _open_packed_files(self)

    def readers(self, model: PreTrainedModel, files: list[PackedFile]) -> list[PackedFile]:
        """Return the files as transformers is to read them into a model, which has no weights yet."""
        return files

    def postprocess_model(self, model: PreTrainedModel, **_) -> PreTrainedModel:
        """Leave nothing of the loading on the model, except that `save_pretrained` writes a packed checkpoint."""
        _put_opener_back(self)
        if not all(path.is_opened for path in self._paths):
            raise RuntimeError(
                "This release of transformers reads checkpoints in a new way, which is not supported yet."
            )
        hf_private.forget_quantization(model)
        if getattr(model.config, KEY, None):  # shared with the model's parts, which save themselves dense
            setattr(model.config, KEY, dense_config({KEY: getattr(model.config, KEY)})[KEY])
        save_packed_by_default(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class _PackedPath(str):
    """The path of a packed file, for [`_Opener`] alone: any other function finds no file of this name."""

    file: PackedFile
    is_opened: bool

    def __new__(cls, file: PackedFile):
        hint = f"{file.path} (packed: only to be read memory-mapped, without disable_mmap=True){SUFFIX}"
        path = super().__new__(cls, hint)
        path.file, path.is_opened = file, False
        return path


class _Opener:
    """A function that opens packed files, and all others by the function that transformers had before."""

    def __init__(self, before: Callable):
        self.before = before
        self.loads: weakref.WeakSet[PackedQuantizer] = weakref.WeakSet()  # at work

    def __call__(self, path: str | os.PathLike, *args, **kwargs):
        if not isinstance(path, _PackedPath):
            return self.before(path, *args, **kwargs)
        path.is_opened = True
        return path.file


def _open_packed_files(load: PackedQuantizer) -> None:
    """Let transformers open packed files until a load ends, or fails and is forgotten."""
    with _LOCK:
        opener = hf_private.get_file_opener()
        if not isinstance(opener, _Opener):
            opener = _Opener(opener)
            hf_private.set_file_opener(opener)
        opener.loads.add(load)
    weakref.finalize(load, _put_opener_back)


def _put_opener_back(ended: PackedQuantizer | None = None) -> None:
    """Restore the function that transformers had before, unless another load is at work."""
    with _LOCK:
        opener = hf_private.get_file_opener()
        if isinstance(opener, _Opener):
            if ended is not None:
                opener.loads.discard(ended)
            if not list(opener.loads):  # its length counts what has just been forgotten
                hf_private.set_file_opener(opener.before)


_keeping: ContextVar[bool] = ContextVar("sparse weights stay packed", default=False)


@contextmanager
def keeping_packed() -> Iterator[None]:
    """Keep packed the sparse weights of checkpoints that this thread loads while the context lasts, as quantised ones always are.

    transformers has no argument for it: it refuses a `quantization_config` for a checkpoint with its own.
    """
    token = _keeping.set(True)
    try:
        yield
    finally:
        _keeping.reset(token)


def keeps_sparse() -> bool:
    """Return True inside of the context. Threads that read files are outside: ask before they begin."""
    return _keeping.get()
