"""Which class of transformers makes a checkpoint's model: the one that its config names, so that no head is lost."""

import json
from typing import NamedTuple

import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..compat import transformers as internals


# Auto class -> what the Hub calls the task of what it makes. Of several that make the same class, the first counts.
PIPELINE_TAGS = {
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMultimodalLM": "any-to-any",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModel": "feature-extraction",
}
OF_SEVERAL_MODALITIES = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")
OF_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
TRUSTING = ", trust_remote_code=True"
REMOTE_MODULES = "transformers_modules."  # what transformers imports code that comes with models as


class LoadingCode(NamedTuple):
    """What is written to load a model: `"AutoModelForCausalLM"`, and its further arguments."""

    loader: str
    arguments: str = ""  # or TRUSTING

    @property
    def pipeline_tag(self) -> str | None:
        """What the Hub calls the model's task, None if none is known."""
        return PIPELINE_TAGS.get(self.loader)

    def of(self, checkpoint: str, more: str = "") -> str:
        """The expression that loads a checkpoint."""
        return f"{self.loader}.from_pretrained({json.dumps(checkpoint, ensure_ascii=False)}{more}{self.arguments})"


def find_loader(config: PreTrainedConfig, architecture: str | None = None, trust_remote_code: bool = False) -> type:
    """What makes and loads the model of a config: an Auto class where one makes the very class, else the class itself.

    Nothing is imported but what lies in transformers; code that comes with the model stays where it is until the Auto
    class, which is told to trust it, runs it.

    Args:
        config (`PreTrainedConfig`): of the checkpoint.
        architecture (`str`, *optional*): name of the model's class. None: the first of `config.architectures`.
        trust_remote_code (`bool`): whether a class that comes with the model is wanted.

    Returns:
        `type`: with `from_pretrained`; see [`build`] for a model without weights.

    Raises:
        `ValueError`: the config names a class that transformers does not have.
    """
    architecture = architecture or next(iter(config.architectures or []), None)
    if trust_remote_code and (remote := _remote_loader(config, architecture)):
        return remote
    for name in _auto_classes(config):
        if architecture is not None and getattr(_made_by(name, config), "__name__", None) == architecture:
            return getattr(transformers, name)
    own = _class_named(architecture)
    if own is not None and isinstance(config, own.config_class or ()):
        return own
    is_language_model = architecture is None or architecture.endswith(OF_LANGUAGE_MODELS)
    if is_language_model and _made_by("AutoModelForCausalLM", config) is not None:
        return AutoModelForCausalLM
    named = f"names the class {architecture!r}" if architecture else "names no class ('architectures')"
    raise ValueError(
        f"The config, of model_type {config.model_type!r}, {named}, and transformers has no such model: if its code comes "
        "with it, allow that (trust_remote_code); or load it yourself and give it to NeuronALPruner.prune."
    )


def loading_code(model: PreTrainedModel) -> LoadingCode:
    """How to load a model's checkpoint as the class that it is of."""
    remote = type(model).__module__.startswith(REMOTE_MODULES)
    try:
        loader = find_loader(model.config, type(model).__name__, remote).__name__
    except ValueError:  # a class of the caller's own
        loader = "AutoModelForCausalLM"
    return LoadingCode(loader, TRUSTING if remote else "")


def model_class(loader: type, config: PreTrainedConfig) -> type | None:
    """The class that a loader makes of a config; None if that is only known when code of the model's own has run."""
    if issubclass(loader, PreTrainedModel):
        return loader
    return _made_by(loader.__name__, config)


def build(loader: type, config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
    """A model of a config, without weights of a checkpoint; `kwargs` are `dtype` and `trust_remote_code`."""
    if issubclass(loader, PreTrainedModel):
        kwargs.pop("trust_remote_code", None)
        return internals.from_config(loader, config, **kwargs)
    return loader.from_config(config, **kwargs)


def _auto_classes(config: PreTrainedConfig) -> list[str]:
    """Names of those that may make its class: of several modalities only where text is a part among others."""
    is_text = config.get_text_config(decoder=True) is config
    return [name for name in PIPELINE_TAGS if not (is_text and name in OF_SEVERAL_MODALITIES)]


def _made_by(auto_class: str, config: PreTrainedConfig) -> type | None:
    return internals.made_by(getattr(transformers, auto_class), type(config))


def _remote_loader(config: PreTrainedConfig, architecture: str | None) -> type | None:
    """The Auto class that a class which comes with the model belongs to."""
    references = getattr(config, "auto_map", None) or {}
    for name in PIPELINE_TAGS:
        reference = references.get(name)
        if isinstance(reference, str) and (architecture is None or reference.rpartition(".")[2] == architecture):
            return getattr(transformers, name)
    return None


def _class_named(name: str | None) -> type[PreTrainedModel] | None:
    """A model class that transformers offers; any other name, also that of one of its modules, is none."""
    found = getattr(transformers, name) if name in dir(transformers) else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None
