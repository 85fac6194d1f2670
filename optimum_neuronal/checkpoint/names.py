"""File names of a checkpoint. transformers and the Hub fix some; plain transformers does not look for the packed ones."""

import re
from fnmatch import fnmatchcase

from ..report import REPORT_NAME


FORMATS = ("dense", "packed")
QUANT_METHOD = "optimum_neuronal"  # of packed checkpoints; programs that do not know it name it in their errors

CONFIG = "config.json"  # without it, a directory is not a model
GENERATION_CONFIG = "generation_config.json"
MODEL_CARD = "README.md"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Files that change how a tokenizer in the same folder reads. A new tokenizer must not meet those of an old one.
TOKENIZER_EXTRAS = (CHAT_TEMPLATE, "special_tokens_map.json", "added_tokens.json")
ADAPTER_CONFIG = "adapter_config.json"  # transformers loads an adapter in the same folder along with the model

SUFFIX = ".safetensors"
DENSE_FILE = f"model{SUFFIX}"  # if there is only one
DENSE_INDEX = f"{DENSE_FILE}.index.json"
PACKED_INDEX = f"packed{SUFFIX}.index.json"  # always written

LISTED_FILE = re.compile(rf"\w[\w.-]*{re.escape(SUFFIX)}")  # an index names no paths and no hidden files

# Shell patterns of the files of weights and their indexes.
WEIGHT_FILES = (
    DENSE_FILE, f"model-[0-9]*-of-[0-9]*{SUFFIX}", DENSE_INDEX, f"packed-[0-9]*-of-[0-9]*{SUFFIX}", PACKED_INDEX,
)  # fmt: skip

# Endings of weight files, of all frameworks and tools.
FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
WEIGHT_SUFFIXES = (SUFFIX, ".index.json", *FOREIGN_SUFFIXES)


def is_of_weights(name: str) -> bool:
    """Return True for a file of weights, or an index, that this package or transformers wrote."""
    return any(fnmatchcase(name, pattern) for pattern in WEIGHT_FILES)


def belongs_to_model(name: str) -> bool:
    """Return True for a file of an old model that a save removes."""
    return is_of_weights(name) or name == GENERATION_CONFIG


def belongs_to_model_or_tokenizer(name: str) -> bool:
    """Return True for a file that a save with a tokenizer removes: the new model or tokenizer may not have it."""
    return belongs_to_model(name) or name in (*TOKENIZER_EXTRAS, REPORT_NAME)
