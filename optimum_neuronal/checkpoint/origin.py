"""Where a model was loaded from, as it may be told to others: no folder of this machine is published."""

import re
from pathlib import Path

from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel


# A folder of the Hub's cache: models--OWNER--NAME/snapshots/REVISION
SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[^/]+/?$")


def hub_id(model: PreTrainedModel) -> str | None:
    """The id of the repository on the Hub that a model was loaded from; None if it came from elsewhere."""
    origin = model.config.name_or_path
    if not origin:
        return None
    if (path := Path(origin)).exists():
        cached = SNAPSHOT.search(path.absolute().as_posix())
        return cached[1].replace("--", "/") if cached else None
    try:
        validate_repo_id(origin)
    except HFValidationError:
        return None
    return origin


def public_name(model: PreTrainedModel) -> str:
    """What a model is called in tables and figures: its id on the Hub, the name of its folder, or its class."""
    origin = model.config.name_or_path
    return hub_id(model) or (origin and Path(origin).absolute().name) or type(model).__name__
