"""`save_pretrained` of sparse models in either format, and models that are saved packed by default."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..common.validation import check_choice
from ..compat import hf_private
from ..files.atomic import replaced_directory
from ..model.packed_modules import dense_state, packed_modules
from ..model.weight_names import natural_order
from .names import CONFIG, DENSE_FILES, FORMATS, PACKED_FILES, is_of_weights
from .opening import dense_weights
from .own_files import check_directory
from .stored_format import add_hint, dense_config, packed_config
from .stored_weights import StoredWeight
from .weight_writers import SHARD_SIZE, DenseWriter, PackedWriter


# A shard of an offloaded model is held in memory while it is written: at most a block, of which pruning holds several, or
# this many bytes.
OFFLOADED_SHARD = 64 * 10**6
PARAMETERS = list(inspect.signature(PreTrainedModel.save_pretrained).parameters.values())[1:]  # without self
POSITIONAL = [parameter.name for parameter in PARAMETERS[1:]]  # behind the directory
OF_TRANSFORMERS = ("push_to_hub", "variant", "distributed_checkpoint")  # write into the directory itself


def save_pretrained(model: PreTrainedModel, save_directory: str | Path, format: str = "dense", **kwargs: Any) -> None:
    """Save a model as transformers' `save_pretrained` does, in either of the formats of sparse models.

    ```python
    model = AutoModelForCausalLM.from_pretrained("llama-70")
    save_pretrained(model, "llama-70-packed", format="packed")
    ```

    A save that fails leaves the directory as it was. (A dense one with `push_to_hub`, `variant` or `distributed_checkpoint`,
    of adapters, or of a model that is spread over processes is left to transformers, which writes file by file.)

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
        `OSError`: the directory cannot be written.
    """
    model = _uncompiled(model)
    if "max_shard_size" in kwargs:
        hf_private.bytes_of(kwargs["max_shard_size"])
    check_choice("format", format, FORMATS)
    path, is_main = check_directory(save_directory), kwargs.get("is_main_process", True)
    if format == "packed" or _is_packed(model):
        _check_packable(model, kwargs)
        if not is_main:
            return
    elif _is_left_to_transformers(model, kwargs):
        with _config_of(model, dense_config):
            type(model).save_pretrained(model, path, **kwargs)
        if is_main:
            _remove(path, PACKED_FILES)
        return
    with replaced_checkpoint(path, is_of_weights) as staging:
        write_model(model, staging, format, **kwargs)


@contextmanager
def replaced_checkpoint(path: Path, belongs: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the staging folder of [`replaced_directory`]; errors of the disk say that nothing was changed."""
    try:
        with replaced_directory(path, belongs, last=CONFIG) as staging:
            yield staging
    except FileExistsError:  # says itself what is in the way
        raise
    except (OSError, SafetensorError) as error:
        raise OSError(f"Saving to {path} failed, and its files are as they were: {error}") from error


def write_model(model: PreTrainedModel, folder: Path, format: str, **kwargs: Any) -> None:
    """Write a model's config and weights into an empty folder; [`save_pretrained`] has the arguments."""
    is_offloaded, is_packed = any(parameter.is_meta for parameter in model.parameters()), _is_packed(model)
    change = packed_config if format == "packed" else dense_config
    with _config_of(model, change):
        if is_offloaded:  # transformers alone can read the weights, shard by shard
            kwargs.setdefault("max_shard_size", max(OFFLOADED_SHARD, _largest_block(model)))
            with hf_private.known_as_offloaded(model):
                type(model).save_pretrained(model, folder, **kwargs)
        elif format == "dense" and not is_packed:
            type(model).save_pretrained(model, folder, **kwargs)
        else:
            with _no_progress_bar():
                type(model).save_pretrained(model, folder, **{**kwargs, "state_dict": {}})
    size = kwargs.get("max_shard_size", SHARD_SIZE)
    if format == "packed":
        if is_offloaded:
            files = dense_weights(folder)
            count, tensors = sum(map(len, files.values())), _taken(files)
        else:
            found = checkpoint_tensors(model)
            count, tensors = len(found), iter(found.items())
        with PackedWriter(folder, size) as writer:
            for name, tensor in logging.tqdm(tensors, desc="Packing weights", total=count, disable=None):
                writer.add(name, tensor)
        _remove(folder, DENSE_FILES)
        add_hint(folder, writer.quantized)  # transformers would leave it out
    elif is_packed:
        _remove(folder, DENSE_FILES)  # of no weights
        with DenseWriter(folder, size) as writer:
            for name, tensor in logging.tqdm(
                checkpoint_tensors(model).items(), desc="Unpacking weights", disable=None
            ):
                writer.add(name, tensor)


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
        if hf_private.has_own_adapters(self.model):
            return type(self.model).save_pretrained(self.model, save_directory, **kwargs)
        dense = "state_dict" in kwargs and not _is_packed(self.model)
        save_pretrained(self.model, save_directory, format or ("dense" if dense else "packed"), **kwargs)


def _is_packed(model: PreTrainedModel) -> bool:
    """Return True if the model computes with packed weights."""
    return next(packed_modules(model), None) is not None


def _is_left_to_transformers(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> bool:
    """Return True for a dense save that is more than files of one process in one directory."""
    several = not kwargs.get("is_main_process", True) or any(hasattr(p, "device_mesh") for p in model.parameters())
    return several or hf_private.has_own_adapters(model) or any(kwargs.get(name) for name in OF_TRANSFORMERS)


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


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that `save_pretrained` would write, by their names in the files, ordered.

    Equal models give equal files. Packed weights are [`StandIn`]s.
    """
    stored = hf_private.stored_tensors(model, *dense_state(model))
    return dict(sorted(stored.items(), key=lambda item: natural_order(item[0])))


def _taken(files: Mapping[Path, list[StoredWeight]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of files with their names; remove each file when all its weights were read."""
    for path, weights in files.items():
        yield from ((weight.name, weight[...]) for weight in weights)
        path.unlink()


def _largest_block(model: PreTrainedModel) -> int:
    """Return the bytes of the largest module in any list of modules: a decoder block."""
    blocks = [block for modules in model.modules() if isinstance(modules, nn.ModuleList) for block in modules]
    return max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks)


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
