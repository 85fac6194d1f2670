"""The metadata of a model card, which the Hub reads: origin, licence, tags and measured figures."""

import math
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel

from ..data.hub_datasets import CALIBRATION_DATASETS
from ..report import PruningReport
from .dense_card import inherited_metadata
from .origin import hub_id


TAGS = ("sparse", "pruned", "optimum_neuronal")  # what people look for; methods are told in the text


def make_metadata(
    model: PreTrainedModel, report: PruningReport, title: str, pipeline_tag: str | None = "text-generation"
) -> ModelCardData:
    """The metadata.

    Args:
        model (`PreTrainedModel`): the pruned model; its config tells where the dense one came from.
        report ([`PruningReport`]): of the prune.
        title (`str`): how the model is called.
        pipeline_tag (`str`, *optional*): what the Hub calls its task; None if that is not known.
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
        tags=list(TAGS),
        **relation,
        **inherited_metadata(model),
        **({"model_name": title, "eval_results": results} if results else {}),
    )


def perplexity_result(dataset: str, perplexity: float) -> EvalResult:
    """A perplexity as the Hub's `model-index` has it, under the id of the dataset if that is on the Hub.

    Args:
        dataset (`str`): as for [`evaluate_perplexity`], without folders.
        perplexity (`float`): at least 1, finite.
    """
    known, place = CALIBRATION_DATASETS.get(dataset), "custom"
    if known is not None:
        place = known.hub_id
    elif "/" in dataset and not Path(dataset).suffix:
        place = _id_or_custom(dataset.partition(":")[0])
    return EvalResult(
        task_type="text-generation",
        dataset_type=place,
        dataset_name=dataset,
        dataset_config=known.config if known else None,
        dataset_split=known.test_split if known else None,
        metric_type="perplexity",
        metric_name="perplexity",
        metric_value=round(float(perplexity), 4),
    )


def _id_or_custom(name: str) -> str:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return "custom"
    return name
