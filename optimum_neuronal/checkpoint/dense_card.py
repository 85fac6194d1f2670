"""What a pruned model inherits from its dense model's card: the licence above all."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from transformers import PreTrainedModel

from ..system.notes import get_logger
from .files import check_file
from .names import MODEL_CARD
from .origin import hub_id


logger = get_logger(__name__)

INHERITED = ("license", "license_name", "license_link", "language", "datasets")
TIMEOUT = 10  # seconds for the Hub to answer
LARGEST = 10**6  # bytes of a card


def inherited_metadata(model: PreTrainedModel) -> dict[str, Any]:
    """Metadata of the dense model's card that hold for the pruned one; empty where there is no card, or none to be had.

    A model that was loaded from a directory has its card there, and nobody else is asked.

    Args:
        model (`PreTrainedModel`): its config tells where it was loaded from.
    """
    origin, repository = model.config.name_or_path, hub_id(model)
    try:
        if origin and Path(origin).is_dir():
            found = _of_directory(Path(origin))
        elif repository is not None:
            found = HfApi().model_info(repository, timeout=TIMEOUT).card_data
        else:
            return {}
        found = {} if found is None else found.to_dict()
    except Exception as error:  # of many kinds: no network, no card, no YAML; a model is saved without
        logger.info(f"Nothing was inherited from the card of {repository or origin}: {error}")
        return {}
    return _checked(found, repository)


def _of_directory(directory: Path):
    path = check_file(directory, MODEL_CARD)
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} is larger than {LARGEST:,} bytes.")
    return ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).data


def _checked(found: Mapping[str, Any], repository: str | None) -> dict[str, Any]:
    """What is text or a list of texts; a link to a file of the dense model's repository leads there."""
    kept = {}
    for key in INHERITED:
        value = found.get(key)
        texts = value if isinstance(value, list) else [value]
        if texts and all(isinstance(text, str) and text.isprintable() for text in texts):
            kept[key] = value
    link = kept.get("license_link")
    if link is not None and not re.match(r"https?://", str(link)):
        if repository is None:  # whose file is not published
            del kept["license_link"]
        else:
            kept["license_link"] = f"https://huggingface.co/{repository}/blob/main/{link}"
    return kept
