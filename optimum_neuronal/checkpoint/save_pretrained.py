"""`save_pretrained` of sparse models in either format, and models that are saved packed by default."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import logging

from ..compat import transformers as internals
from ..files.scratch import scratch_directory
from ..formats.stand_in import StandIn
from ..model.packed_modules import dense_state, packed_modules
from ..model.weight_names import natural_order
from ..validation import check_choice, check_path
from .coding import Coding, HeadCoding
from .names import DENSE_FILES, FORMATS, PACKED_FILES, SUFFIX
from .sparsity_config import KEY, read_sparsity_config
from .stored_format import add_hint, dense_config, packed_config
from .weight_writers import SHARD_SIZE, DenseWriter, PackedWriter


PARAMETERS = list(inspect.signature(PreTrainedModel.save_pretrained).parameters.values())[1:]  # without self
POSITIONAL = [parameter.name for parameter in PARAMETERS[1:]]  # behind the directory


def save_pretrained(model: PreTrainedModel, save_directory: str | Path, format: str, **kwargs: Any) -> None:
    """Save a model as transformers' `save_pretrained` does, in either of the formats of sparse models.

    ```python
    model = AutoModelForCausalLM.from_pretrained("llama-70")
    save_pretrained(model, "llama-70-packed", format="packed")
    ```

    Args:
        model (`PreTrainedModel`): however it was made; of a compiled one the model inside is saved.
        save_directory (`str` or `Path`): created if missing; weights of another save are removed from it.
        format (`str`):
            `"packed"`: the non-zero values and bitmasks, see docs/format.md; `"dense"`: ordinary safetensors with zeros.
        kwargs:
            For transformers' `save_pretrained`. Packed files hold at most 2 GB, whatever `max_shard_size` is, since one is
            held in memory while it is written; with `format="packed"` there is no `state_dict`, `variant` and `push_to_hub`.

    Raises:
        `TypeError`: no model of transformers.
        `ValueError`: another format, or an argument or a model that the packed format does not admit.
    """
    check_path("save_directory", save_directory)
    model = _uncompiled(model)
    if "max_shard_size" in kwargs:
        internals.bytes_of(kwargs["max_shard_size"])
    check_choice("format", format, FORMATS)
    if format == "dense":
        if _is_packed(model):
            _save_unpacked(model, Path(save_directory), **kwargs)
        else:
            with _config_of(model, dense_config):
                type(model).save_pretrained(model, save_directory, **kwargs)
        _remove(save_directory, PACKED_FILES)
    else:
        _check_packable(model, kwargs)
        if kwargs.get("is_main_process", True):
            _save_packed(model, Path(save_directory), **kwargs)


def save_packed_by_default(model: PreTrainedModel) -> None:
    """Make `model.save_pretrained(directory)`, and its callers, write the packed format.

    With `format="dense"` or a `state_dict` it writes the dense format: Trainer passes a `state_dict`, so its checkpoints
    load without this package. Adapters of PEFT are saved as always.
    """
    model.save_pretrained = _PackedByDefault(model)


def saves_packed_by_default(model: PreTrainedModel) -> bool:
    """Return True if [`save_packed_by_default`] was called for a model."""
    return isinstance(model.__dict__.get("save_pretrained"), _PackedByDefault)


def save_plainly(model: PreTrainedModel) -> None:
    """Take back [`save_packed_by_default`]."""
    if saves_packed_by_default(model):
        del model.save_pretrained


def _uncompiled(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside of a compiled one, which has other names for its weights. Raise if there is no model."""
    model = model._orig_mod if "_orig_mod" in getattr(model, "_modules", {}) else model
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"save_pretrained got a {type(model).__name__}: expected a transformers PreTrainedModel. Pass the one that is "
            "inside of it; adapters are merged first (merge_and_unload), or saved by their own save_pretrained."
        )
    compiled = next((name for name, _ in model.named_modules() if name.rpartition(".")[2] == "_orig_mod"), None)
    if compiled is not None:
        place = compiled.rpartition(".")[0]
        raise ValueError(
            f"{place} was replaced by what torch.compile returned, so that its weights have other names: put "
            f"{place}._orig_mod back before saving, or compile it in place, with {place}.compile()."
        )
    return model


class _PackedByDefault:
    """A model's `save_pretrained`. Unlike a bound method it is copied and pickled with the model."""

    format = "packed"  # the default

    def __init__(self, model: PreTrainedModel):
        self.model = model

    __signature__ = inspect.Signature(PARAMETERS)
    __doc__ = PreTrainedModel.save_pretrained.__doc__

    def __call__(self, save_directory: str | Path, *args: Any, format: str | None = None, **kwargs: Any) -> Any:
        kwargs |= dict(zip(POSITIONAL, args))
        if internals.has_own_adapters(self.model):
            return type(self.model).save_pretrained(self.model, save_directory, **kwargs)
        dense = "state_dict" in kwargs and not _is_packed(self.model)
        save_pretrained(self.model, save_directory, format or ("dense" if dense else "packed"), **kwargs)


def _is_packed(model: PreTrainedModel) -> bool:
    """Return True if the model computes with packed weights."""
    return next(packed_modules(model), None) is not None


def _check_packable(model: PreTrainedModel, kwargs: dict) -> None:
    if kwargs.get("state_dict") and _is_packed(model):
        raise ValueError("save_pretrained(state_dict=...) of a model with packed weights: leave it out.")
    for name in ("state_dict", "variant", "push_to_hub"):
        if kwargs.get(name):
            instead = "call push_to_hub" if name == "push_to_hub" else "save with format='dense'"
            raise ValueError(f"save_pretrained({name}=...) has no packed format: {instead}.")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise ValueError(f"{name} is spread over processes, which has no packed format: save with format='dense'.")


def _save_packed(model: PreTrainedModel, folder: Path, max_shard_size: int | str = SHARD_SIZE, **kwargs: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with PackedWriter(folder, max_shard_size) as writer:
        if any(parameter.is_meta for parameter in model.parameters()):
            _pack_offloaded(model, writer, max_shard_size, **kwargs)
        else:
            tensors = checkpoint_tensors(model)
            _set_codings(writer, model, tensors)
            for name, tensor in logging.tqdm(tensors.items(), desc="Packing weights"):
                writer.add(name, tensor)
        writer.warn()
        _remove(folder, PACKED_FILES)
    _save_all_but_weights(model, folder, packed_config, **kwargs)
    add_hint(folder)  # transformers would leave it out


def _set_codings(writer: PackedWriter, model: PreTrainedModel, names: Iterable[str]) -> None:
    """Give a writer the coding of weights of these names, if the model has quantised values."""
    sparsity_config = getattr(model.config, KEY, None)
    bits = ("value_bits", "embedding_bits")
    if not isinstance(sparsity_config, Mapping) or all(sparsity_config.get(name) is None for name in bits):
        return
    recorded = read_sparsity_config(model.config) or {}
    if recorded.get("value_bits") is not None:
        writer.coding = Coding(recorded, names)
    if recorded.get("embedding_bits") is not None:
        writer.head = HeadCoding(recorded, names)


def _save_all_but_weights(model: PreTrainedModel, folder: Path, change: Callable, **kwargs: Any) -> None:
    """Save all but the weights, and remove dense ones: first, since the model may be mapped to them, and at last."""
    _remove(folder, DENSE_FILES)
    with _config_of(model, change), _no_progress_bar():
        type(model).save_pretrained(model, folder, state_dict={}, **kwargs)
    _remove(folder, DENSE_FILES)


def _save_unpacked(
    model: PreTrainedModel, folder: Path, max_shard_size: int | str = SHARD_SIZE, **kwargs: Any
) -> None:
    """Save a model that computes with packed weights dense, unpacking one after the other."""
    _check_packable(model, kwargs)
    if not kwargs.get("is_main_process", True):
        return
    folder.mkdir(parents=True, exist_ok=True)
    _save_all_but_weights(model, folder, dense_config, **kwargs)
    with DenseWriter(folder, internals.bytes_of(max_shard_size)) as writer:
        for name, tensor in logging.tqdm(checkpoint_tensors(model).items(), desc="Unpacking weights"):
            dense = tensor.unpack() if isinstance(tensor, StandIn) else tensor.detach()
            writer.add(name, dense.to("cpu", copy=True, memory_format=torch.contiguous_format))


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that `save_pretrained` would write, by their names in the files, ordered.

    Equal models give equal files. Packed weights are [`StandIn`]s.
    """
    stored = internals.stored_tensors(model, *dense_state(model))
    return dict(sorted(stored.items(), key=lambda item: natural_order(item[0])))


def _pack_offloaded(model: PreTrainedModel, writer: PackedWriter, max_shard_size: int | str, **kwargs: Any) -> None:
    """Pack weights that are on disk by way of dense files, which transformers alone can make of them."""
    with scratch_directory(writer.folder, ".dense") as dense, internals.known_as_offloaded(model):
        type(model).save_pretrained(model, dense, max_shard_size=max_shard_size, **kwargs)
        paths = sorted(dense.glob(f"*{SUFFIX}"))
        _set_codings(writer, model, [name for path in paths for name in _names(path)])
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    writer.add(name, file.get_tensor(name))
            path.unlink()


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar that `save_pretrained` shows even for no weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _config_of(model: PreTrainedModel, change: Callable) -> Iterator[None]:
    """Give the model's config the format of a dense or packed checkpoint while the context lasts."""
    names = ("sparsity_config", "quantization_config")
    before = {name: getattr(model.config, name) for name in names if hasattr(model.config, name)}
    during = change(before)
    try:
        for name, value in during.items():
            setattr(model.config, name, value)
        yield
    finally:
        for name in during.keys() - before.keys():
            delattr(model.config, name)
        for name, value in before.items():
            setattr(model.config, name, value)


def _remove(folder: str | Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for file in Path(folder).glob(pattern):
            file.unlink()
