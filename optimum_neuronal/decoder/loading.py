"""Opens a checkpoint whose blocks stay on disk, for models that are larger than memory."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .finding import find_decoder


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
        model_kwargs: for `AutoModelForCausalLM.from_pretrained`.

    Returns:
        `PreTrainedModel`: with meta tensors and accelerate's hooks in place of weights on disk.
    """
    shared = {key: model_kwargs[key] for key in ("revision", "trust_remote_code", "token") if key in model_kwargs}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_or_path, **shared),
            trust_remote_code=model_kwargs.get("trust_remote_code", False),
        )
    device_map = streamed_device_map(skeleton, device)
    return AutoModelForCausalLM.from_pretrained(
        model_or_path, device_map=device_map, offload_folder=str(offload_folder), **model_kwargs
    )


def streamed_device_map(model: PreTrainedModel, device: torch.device) -> dict[str, str | torch.device]:
    """Module name -> where its weights live: the decoder's blocks on disk, all others on an accelerator's device."""
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
