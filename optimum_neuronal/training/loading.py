"""Lets `load_state_dict`, with which `Trainer` reads its checkpoints, read the names that transformers saves.

transformers converts the weights of some families when it saves and loads: experts of MoE layers are stored one by one, and
stacked in the model. `Trainer` does not convert them, so it would not load the experts.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..compat import hf_private


_loading: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models that read the names of their checkpoints


def load_stored_names(model: PreTrainedModel) -> bool:
    """Let the `load_state_dict` of a model read what `save_pretrained` wrote. Return False if that changes nothing."""
    if model in _loading or hasattr(model, "peft_config") or not _only_stored(model):  # adapters alone are saved
        return False
    model.register_load_state_dict_pre_hook(_convert)
    _loading.add(model)
    return True


def _stored(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return the names that a checkpoint has for tensors of a model."""
    state = model.state_dict()
    stand_ins = {name: torch.empty(state[name].shape, dtype=state[name].dtype, device="meta") for name in names}
    return set(hf_private.as_stored(model, stand_ins))


def _only_stored(model: PreTrainedModel) -> set[str]:
    """Return the names in a model's checkpoints that its state dict does not have."""
    return _stored(model, model.state_dict()) - set(model.state_dict())


def _convert(model: PreTrainedModel, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace the tensors of a state dict that have names of a checkpoint with the model's, in place.

    transformers converts them when it loads them into a second model, and raises if some are missing, as in one of several
    files.
    """
    given = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    stored = _only_stored(model) & given.keys()
    if not stored:
        return
    options = {"config": model.config, "dtype": model.dtype, "output_loading_info": True}
    second, found = type(model).from_pretrained(None, state_dict=given, **options)
    converted = {name: tensor for name, tensor in second.state_dict().items() if name not in found["missing_keys"]}
    for name in stored:
        del state[prefix + name]
    state.update({prefix + name: tensor for name, tensor in converted.items() if name not in given})
