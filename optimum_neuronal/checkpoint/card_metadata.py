"""The metadata of a model card, which the Hub reads: origin, licence, tags and measured figures."""

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel

from ..common.notes import get_logger
from ..data.documents import CALIBRATION_DATASETS
from ..report import PruningReport
from .hub import hub_id
from .names import MODEL_CARD
from .safe_files import read_bytes


logger = get_logger(__name__)

# What people look for; the text names the methods.
TAGS, TAGS_OF_FEW_BITS = ("sparse", "pruned", "optimum_neuronal"), ("quantized", "optimum_neuronal")
INHERITED = ("license", "license_name", "license_link", "language", "datasets")
TIMEOUT = 10  # seconds for the Hub to answer
LARGEST = 10**6  # bytes of a card


def make_metadata(
    model: PreTrainedModel, report: PruningReport, title: str, pipeline_tag: str | None = "text-generation"
) -> ModelCardData:
    """Return the metadata of a pruned model's card.

    Args:
        model (`PreTrainedModel`): the pruned model; its config names the origin of the dense one.
        report ([`PruningReport`]): of the prune.
        title (`str`): name of the model.
        pipeline_tag (`str`, *optional*): the Hub's name of its task; None if that is not known.
    """
    base = hub_id(model)
    # The Hub knows adapter, merge, quantized and finetune, and takes a model that does not say for a finetune. Of these
    # only "quantized" means the same model made smaller, without training.
    relation = {"base_model": base, "base_model_relation": "quantized"} if base else {}
    results = [
        perplexity_result(dataset, found["pruned"])
        for dataset, found in report.evaluation.items()
        if math.isfinite(found.get("pruned", math.inf))
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=list(TAGS if report.config.get("bits_per_weight") is None else TAGS_OF_FEW_BITS),
        **relation,
        **inherited_metadata(model),
        **({"model_name": title, "eval_results": results} if results else {}),
    )


def perplexity_result(dataset: str, perplexity: float) -> EvalResult:
    """Return a perplexity for the Hub's `model-index`, under the id of the dataset if that is on the Hub.

    Args:
        dataset (`str`): as for [`evaluate_perplexity`], without folders.
        perplexity (`float`): at least 1, finite.
    """
    known, place = CALIBRATION_DATASETS.get(dataset), "custom"
    if known is not None:
        place = known.path
    elif "/" in dataset and not Path(dataset).suffix:
        with suppress(HFValidationError):
            validate_repo_id(dataset.partition(":")[0])
            place = dataset.partition(":")[0]
    return EvalResult(
        task_type="text-generation",
        dataset_type=place,
        dataset_name=dataset,
        dataset_config=known.config if known else None,
        dataset_split=known.splits[1] if known else None,
        metric_type="perplexity",
        metric_name="perplexity",
        metric_value=round(float(perplexity), 4),
    )


def inherited_metadata(model: PreTrainedModel) -> dict[str, Any]:
    """Return the metadata of the dense model's card that hold for the pruned one; empty where no card can be had.

    A model that was loaded from a directory has its card there, and the Hub is not asked. A relative link to a licence
    becomes one to the dense model's repository, and is left out if there is none.

    Args:
        model (`PreTrainedModel`): its config names its origin.
    """
    origin, repository = model.config.name_or_path, hub_id(model)
    try:
        if origin and Path(origin).is_dir():
            card = read_bytes(Path(origin), MODEL_CARD, LARGEST).decode("utf-8")
            data = ModelCard(card, ignore_metadata_errors=True).data
        elif repository is not None:
            data = HfApi().model_info(repository, timeout=TIMEOUT).card_data
        else:
            return {}
        found = {} if data is None else data.to_dict()
    except Exception as error:  # of many kinds: no network, no card, no YAML; a model is saved without
        logger.info(f"Nothing was inherited from the card of {repository or origin}: {error}")
        return {}
    kept = {key: found[key] for key in INHERITED if _is_text(found.get(key))}
    link = kept.get("license_link")
    if link is not None and not re.match(r"https?://", str(link)):
        kept["license_link"] = f"https://huggingface.co/{repository}/blob/main/{link}"
        if repository is None:
            del kept["license_link"]
    return kept


def _is_text(value: Any) -> bool:
    """Return True for text, or a list of texts, that can be shown."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) and text.isprintable() for text in texts)
