"""Loads the model of a checkpoint: whole, as a skeleton without weights, or with its blocks left on disk."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .checking import check_kind
from .finding import find_decoder
from .model_class import build, find_loader, model_class


# Arguments of `from_pretrained` that tell where a checkpoint's files are: of a tokenizer's, and of a model's config.
OF_TOKENIZERS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "token", "trust_remote_code",
)  # fmt: skip
OF_CONFIGS = (*OF_TOKENIZERS, "code_revision", "gguf_file", "subfolder")


def load_model(model_or_path: str | os.PathLike[str], **model_kwargs: Any) -> PreTrainedModel:
    """Loads a model as the class that its config names: with its own head, of a multimodal model all parts.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the model.
        model_kwargs: for `from_pretrained`: `dtype`, `device_map`, `revision`, ...

    Raises:
        `ValueError`: a kind of model that is not pruned, or a class that transformers does not have; no weight is read.
    """
    loader, _ = _find_loader(model_or_path, model_kwargs)
    return loader.from_pretrained(model_or_path, **model_kwargs)


def _find_loader(model_or_path: str | os.PathLike[str], kwargs: dict) -> tuple[type, PreTrainedConfig]:
    """What loads a checkpoint's model, and its config."""
    config = kwargs.get("config")
    if config is None:
        config = AutoConfig.from_pretrained(model_or_path, **_for_configs(kwargs))
    loader = find_loader(config, trust_remote_code=bool(kwargs.get("trust_remote_code")))
    check_kind(model_class(loader, config), config)
    return loader, config


def _for_configs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments of `from_pretrained` that tell where a checkpoint's files are."""
    return {name: kwargs[name] for name in OF_CONFIGS if name in kwargs}


def load_skeleton(model_or_path: str | Path, dtype: str | torch.dtype = "auto", **config_kwargs) -> PreTrainedModel:
    """The model on the meta device: shapes and dtypes without weights. Only its config is read.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the model.
        dtype (`str` or `torch.dtype`): of the weights; `"auto"` is the config's own, or float32 if it names none.
        config_kwargs: for `AutoConfig.from_pretrained`: `revision`, `token`, `trust_remote_code` (for the model too).

    Raises:
        `ValueError`: no floating dtype; and what [`load_model`] raises.
    """
    loader, config = _find_loader(model_or_path, config_kwargs)
    if dtype == "auto":
        dtype = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}: expected 'auto', 'float32', 'bfloat16' or 'float16'.")
    trust_remote_code = config_kwargs.get("trust_remote_code", False)
    with torch.device("meta"):
        return build(loader, config, dtype=known, trust_remote_code=trust_remote_code)


def load_streamed(
    model_or_path: str | Path, device: torch.device, offload_folder: str | Path, **model_kwargs
) -> PreTrainedModel:
    """Loads a model without its decoder blocks' weights, which are read from its files whenever they are needed.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the model, in safetensors.
        device (`torch.device`): where to compute. On an accelerator embeddings and head are loaded onto it; on a CPU
            they stay on disk too.
        offload_folder (`str` or `Path`):
            Where weights are written that are stored otherwise than the model keeps them (many mixtures of experts);
            it must outlive the model.
        model_kwargs: for [`load_model`].

    Returns:
        `PreTrainedModel`: with meta tensors and accelerate's hooks in place of weights on disk.
    """
    # On a CPU all weights stay on disk, whatever the model consists of.
    skeleton = None if device.type == "cpu" else load_skeleton(model_or_path, **_for_configs(model_kwargs))
    device_map = streamed_device_map(skeleton, device)
    return load_model(model_or_path, device_map=device_map, offload_folder=str(offload_folder), **model_kwargs)


def streamed_device_map(model: PreTrainedModel | None, device: torch.device) -> dict[str, str | torch.device]:
    """Where weights live that are read block by block.

    Args:
        model (`PreTrainedModel`): its skeleton will do; on a CPU it is not looked at, and may be None.
        device (`torch.device`): where to compute.

    Returns:
        `dict`: module name -> `"disk"` for the decoder's blocks, the device for all others; on a CPU, all on disk.
    """
    if device.type == "cpu":
        return {"": "disk"}
    blocks = find_decoder(model).blocks[0].name.rpartition(".")[0]
    placed: dict[str, str | torch.device] = {blocks: "disk"}

    def place(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            full = prefix + name
            if blocks.startswith(full + "."):
                place(child, full + ".")
            elif full != blocks:
                placed[full] = device

    place(model, "")
    return placed
