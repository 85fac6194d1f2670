"""Gives a model another config."""

from transformers import PreTrainedConfig, PreTrainedModel


def set_config(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Replace the config of a model, and of its modules that share it. Other models that share it keep it."""
    before = model.config
    for module in model.modules():  # blocks read how they attend from the model's config
        if module.__dict__.get("config") is before:
            module.config = config
