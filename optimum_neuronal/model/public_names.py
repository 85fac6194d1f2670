"""Names of models for reports, which are published: without folders of this machine."""

import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel


# A folder of the Hub's cache: models--OWNER--NAME/snapshots/REVISION
SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[^/]+/?$")


def hub_id(model: PreTrainedModel) -> str | None:
    """Return the id of the repository on the Hub that a model was loaded from, or None."""
    origin = model.config.name_or_path
    if not origin:
        return None
    if (path := Path(origin)).exists():
        cached = SNAPSHOT.search(path.absolute().as_posix())
        return cached[1].replace("--", "/") if cached else None
    with suppress(HFValidationError):
        validate_repo_id(origin)
        return origin
    return None


def public_name(model: PreTrainedModel) -> str:
    """Return the name of a model for tables: its id on the Hub, the name of its folder without the path, or its class."""
    origin = model.config.name_or_path
    return hub_id(model) or (origin and Path(origin).absolute().name) or type(model).__name__
