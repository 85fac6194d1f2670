"""Carries along what makes images, sounds and videos into a multimodal model's inputs: the files of its processor."""

from pathlib import Path

from transformers import PreTrainedModel

from ..compat import transformers as internals
from ..system.notes import get_logger
from .files import read_bytes


# The tokenizer, which is a part of a processor, is saved by itself.
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json",
    "chat_template.json",
)  # fmt: skip

logger = get_logger(__name__)


def copy_processor(model: PreTrainedModel, folder: Path) -> None:
    """Copies the processor's files of the checkpoint that a model was loaded from, byte by byte; those of a text model stay.

    They are copied, and not loaded and saved, so that no library for images or sounds is needed. What the folder has
    already stays as it is. Where they cannot be had, a warning says so.

    Args:
        model (`PreTrainedModel`): its config names the checkpoint.
        folder (`Path`): where the model is saved.
    """
    config = model.config
    if config.get_text_config(decoder=True) is config or not config.name_or_path:
        return
    for name in PROCESSOR_FILES:
        try:
            path = internals.find_file(model, name)
            if path is not None and not (folder / name).exists():
                (folder / name).write_bytes(read_bytes(path.parent, path.name))
        except (OSError, ValueError) as error:
            logger.warning(
                f"{name} of the model's processor could not be read from {config.name_or_path!r} ({error}): if there is such "
                "a file, copy it beside the saved model."
            )
