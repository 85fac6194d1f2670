"""The Auto class of transformers that loads a model."""

import json

import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..compat import hf_private


# Auto class -> the Hub's name for the task of its models. The first Auto class that makes a class is taken.
PIPELINE_TAGS = {
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMultimodalLM": "any-to-any",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModel": "feature-extraction",
    "AutoModelForPreTraining": None,
}
MULTIMODAL_CLASSES = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")


def find_loader(config: PreTrainedConfig, architecture: str | None = None, trust_remote_code: bool = False) -> type:
    """Return the Auto class that makes the model's class for a config. `trust_remote_code`: also by the config's `auto_map`.

    `architecture` names the model's class, by default the first of `config.architectures`.
    """
    architecture = architecture or next(map(str, config.architectures or ()), None)
    references = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    for name in PIPELINE_TAGS:
        reference = references.get(name)
        if isinstance(reference, str) and architecture in (None, reference.rpartition(".")[2]):
            return getattr(transformers, name)
    is_text = config.get_text_config(decoder=True) is config
    for name in PIPELINE_TAGS:
        suits = architecture is not None and not (is_text and name in MULTIMODAL_CLASSES)
        if suits and getattr(hf_private.model_class_for(name, config), "__name__", None) == architecture:
            return getattr(transformers, name)
    is_language_model = architecture is None or architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if is_language_model and hf_private.model_class_for("AutoModelForCausalLM", config) is not None:
        return AutoModelForCausalLM
    known = f"names the class {architecture!r}" if architecture else "names no class ('architectures')"
    raise ValueError(
        f"The config (model_type {config.model_type!r}) {known}: no Auto class for text loads it. Set "
        "trust_remote_code if the checkpoint has its own code, or load it yourself and call NeuronALPruner.prune."
    )


def loading_class(model: PreTrainedModel) -> str:
    """Return the name of the Auto class that loads a model's checkpoint."""
    try:
        return find_loader(model.config, type(model).__name__, model.is_remote_code()).__name__
    except ValueError:  # a class of the caller's own
        return "AutoModelForCausalLM"


def loading_code(model: PreTrainedModel, checkpoint: str) -> str:
    """Return the line of code that loads a model's checkpoint."""
    remote = ", trust_remote_code=True" if model.is_remote_code() else ""
    return f"{loading_class(model)}.from_pretrained({json.dumps(checkpoint, ensure_ascii=False)}{remote})"
