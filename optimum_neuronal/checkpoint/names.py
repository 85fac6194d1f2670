"""The names of a checkpoint's files, each once.

Files that transformers and the Hub look for have their names. The names of packed weights are not found by transformers
without this package (docs/format.md).
"""

import re
from fnmatch import fnmatchcase

from ..report import REPORT_NAME


FORMATS = ("dense", "packed")

CONFIG = "config.json"  # without it a directory is no model
GENERATION_CONFIG = "generation_config.json"
MODEL_CARD = "README.md"

# Adapters of PEFT: transformers loads them with the model in whose directory they lie.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")

SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"
DENSE, PACKED = "model", "packed"  # what the names of weights begin with

DENSE_FILE = f"{DENSE}{SUFFIX}"  # if there is only one
DENSE_INDEX = f"{DENSE}{INDEX_SUFFIX}"
PACKED_INDEX = f"{PACKED}{INDEX_SUFFIX}"  # always there

# What is always, or mostly, written: a folder of such a name would be in the way.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
FILES = (
    CONFIG, GENERATION_CONFIG, MODEL_CARD, REPORT_NAME, DENSE_FILE, DENSE_INDEX, PACKED_INDEX,
    *TOKENIZER_FILES,
)  # fmt: skip

LISTED_FILE = re.compile(rf"\w[\w.-]*{re.escape(SUFFIX)}")  # what an index may name: no path, no hidden file

# Shell patterns of files of weights, and of indexes that name the file of each weight.
DENSE_FILES = (DENSE_FILE, f"{DENSE}-[0-9]*-of-[0-9]*{SUFFIX}", DENSE_INDEX)
PACKED_FILES = (f"{PACKED}-[0-9]*-of-[0-9]*{SUFFIX}", PACKED_INDEX)
WEIGHT_FILES = (*DENSE_FILES, *PACKED_FILES)

# What the names of weights of all frameworks and tools end with.
FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
WEIGHT_SUFFIXES = (SUFFIX, ".index.json", *FOREIGN_SUFFIXES)
TOKENIZER_FOLDERS = ("additional_chat_templates",)


def shard(stem: str, number: int, count: int) -> str:
    """Return the name of one of several files of weights, counted from 1: `model-00001-of-00002.safetensors`."""
    return f"{stem}-{number:05}-of-{count:05}{SUFFIX}"


def is_of_weights(name: str) -> bool:
    """Return True if a file of this name holds weights that this package or transformers wrote, or is their index."""
    return any(fnmatchcase(name, pattern) for pattern in WEIGHT_FILES)
