"""Loads the model of a checkpoint: whole, as a skeleton without weights, or with its blocks left on disk.

The model has the class that the checkpoint's config names, with its head.
"""

import copy
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..compat import hf_private
from .auto_classes import find_loader
from .find_blocks import block_list, check_kind
from .origin import TOKENIZER_KWARGS
from .sources import Source, locate
from .sparsity import read_sparsity_config
from .unread_formats import check_formats, quantization_of


MAX_LAYERS = 2000  # more come from a damaged or hostile config, and would take hours
DENSE_WHEN_LOADED = ("optimum_neuronal", "mxfp4")  # packed checkpoints, which have a message of their own, and GPT-OSS
CONFIG_KWARGS = (*TOKENIZER_KWARGS, "code_revision", "gguf_file")


def load_model(model_or_path: str | os.PathLike[str] | Source, **model_kwargs: Any) -> PreTrainedModel:
    """Load a model as the class that its config names, after checking that it can be pruned (`ValueError`).

    Attributes of the model say what transformers does not keep: `checkpoint_dtype`, see [`checkpoint_dtype`], and
    `checkpoint_place`, the `revision` and others if given. A GGUF file becomes a dense model, with the name of the file as
    its attribute `gguf_file`. A checkpoint that lacks weights is an error: transformers would make them up.
    """
    model_or_path, model_kwargs = locate(model_or_path, model_kwargs)
    config = _read_config(model_or_path, model_kwargs)
    loader = _find_loader(config, model_kwargs)
    gguf_file = model_kwargs.get("gguf_file")
    if gguf_file is not None:
        model_kwargs = {"quantization_config": transformers.GgufConfig(dequantize=True), **model_kwargs}
    dtype = _named_dtype(config)
    try:
        model_kwargs = {**model_kwargs, "config": config}
        model, info = loader.from_pretrained(model_or_path, output_loading_info=True, **model_kwargs)
    except SafetensorError as error:
        raise ValueError(f"A weights file of {model_or_path} is damaged: {error}. Download it again.") from error
    except NameError as error:  # of transformers, without the package for a quantization
        raise ImportError(f"A package that reads the weights of {model_or_path} is missing: {error}.") from error
    check_formats(info["unexpected_keys"], model_or_path)
    if missing := info["missing_keys"]:
        raise ValueError(
            f"{model_or_path} lacks {first_names(missing)}, which would be random numbers: download or save the checkpoint "
            "again."
        )
    model.checkpoint_dtype = dtype
    model.checkpoint_place = _chosen(model_kwargs, ("revision", "cache_dir", "local_files_only"))
    if gguf_file is not None:
        model.gguf_file = gguf_file
    return model


def load_skeleton(
    model_or_path: str | os.PathLike[str] | Source, dtype: str | torch.dtype = "auto", **config_kwargs
) -> PreTrainedModel:
    """Return the model on the meta device. Only its config is read. `dtype="auto"`: the config's, or else float32."""
    model_or_path, config_kwargs = locate(model_or_path, config_kwargs)
    config = _read_config(model_or_path, config_kwargs)
    if dtype == "auto":
        dtype = _named_dtype(config) or torch.float32
    with torch.device("meta"):
        loader = _find_loader(config, config_kwargs)
        return loader.from_config(config, dtype=dtype, **_chosen(config_kwargs, ("trust_remote_code",)))


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a new model of a model's class and config, on the meta device."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def first_names(names: Collection[str]) -> str:
    """Return the first names of weights, and how many more there are."""
    first = ", ".join(sorted(names)[:3])
    return f"{first} and {len(names) - 3:,} more" if len(names) > 3 else first


def check_unquantized(model_or_path: str | os.PathLike[str] | Source) -> None:
    """Raise `ValueError` for a checkpoint that cannot be pruned since its weights are quantized. Only its config is read."""
    model_or_path, kwargs = locate(model_or_path, {})
    if "gguf_file" in kwargs or "quantization_config" in kwargs:
        return
    method = _check_format(model_or_path, kwargs)
    if method and method not in DENSE_WHEN_LOADED:
        raise ValueError(
            f"{model_or_path} is already quantized ({method}): prune the original model in 16 or 32 bits, and "
            "quantize the result."
        )


def _read_config(model_or_path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config that was given, or that of a checkpoint. Raise `ValueError` if it is damaged or hostile."""
    if kwargs.get("config") is not None:
        return kwargs["config"]
    try:
        if "gguf_file" not in kwargs:
            _check_format(model_or_path, kwargs)
        config = AutoConfig.from_pretrained(model_or_path, **_chosen(kwargs, CONFIG_KWARGS))
    except (AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"The config of {model_or_path} is damaged: {reason}. Download or save it again.") from error
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if layers > MAX_LAYERS:
        raise ValueError(f"config.json names {layers:,} layers, expected at most {MAX_LAYERS:,}: it is damaged.")
    # Not the checkpoint's, which may be missing here, or code on the Hub.
    return hf_private.choose_attention(config, kwargs.get("attn_implementation"))


def _check_format(model_or_path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> Any:
    """Return the quantization method that config.json names. Raise `ValueError` for what is not read."""
    config, _ = PreTrainedConfig.get_config_dict(model_or_path, **_chosen(kwargs, CONFIG_KWARGS))
    read_sparsity_config(config)  # transformers takes minutes for a huge one
    return quantization_of(config, model_or_path)


def _find_loader(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> type:
    """Return the class that loads the model of a config, after checking that it is a kind that can be pruned."""
    loader = find_loader(config, trust_remote_code=bool(kwargs.get("trust_remote_code")))
    check_kind(hf_private.model_class_for(loader.__name__, config), config)
    return loader


def _named_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    return config.dtype or config.get_text_config(decoder=True).dtype


def _chosen(kwargs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: kwargs[name] for name in names if name in kwargs}


def checkpoint_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype that the checkpoint of a model from [`load_model`] names, by default the model's own."""
    return getattr(model, "checkpoint_dtype", None) or model.dtype


def load_streamed(
    model_or_path: str | os.PathLike[str] | Source, device: torch.device, offload_folder: str | Path, **model_kwargs
) -> PreTrainedModel:
    """Load a model but leave the weights of its decoder blocks in its files, to be read when they are needed.

    Embeddings and head are loaded onto an accelerator; on a CPU they stay on disk too, unless they are tied: accelerate
    would treat them as two weights. `offload_folder` is for weights that are stored in another layout than the model's
    parameters, as experts often are. It must outlive the model.
    """
    skeleton = load_skeleton(model_or_path, **_chosen(model_kwargs, CONFIG_KWARGS))
    device_map = {"": "disk"}
    if device.type != "cpu" or hf_private.tied_names(skeleton):
        device_map = streamed_device_map(skeleton, device)
    return load_model(model_or_path, device_map=device_map, offload_folder=str(offload_folder), **model_kwargs)


def streamed_device_map(model: PreTrainedModel, device: torch.device) -> dict[str, str]:
    """Return name -> place: `"disk"` for the list of blocks, the device for the largest modules and the tensors beside it.

    Places are text: accelerate passes them to safetensors, which takes no `torch.device`.
    """
    blocks, _ = block_list(model)
    placed = {blocks: "disk"}
    modules = [name for name, _ in model.named_modules() if name]
    for name in [*modules, *model.state_dict()]:
        parent = name.rpartition(".")[0]
        holds_blocks = f"{blocks}.".startswith(f"{name}.")
        if not holds_blocks and (not parent or blocks.startswith(f"{parent}.")):
            placed[name] = str(device)
    return placed
