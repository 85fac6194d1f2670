"""File names of a checkpoint. transformers and the Hub fix some; plain transformers does not look for the packed ones."""

FORMATS = ("dense", "packed")
QUANT_METHOD = "optimum_neuronal"  # of packed checkpoints; programs that do not know it name it in their errors

CONFIG = "config.json"  # without it, a directory is not a model
MODEL_CARD = "README.md"
CHAT_TEMPLATE = "chat_template.jinja"
ADAPTER_CONFIG = "adapter_config.json"  # transformers loads an adapter in the same folder along with the model

SUFFIX = ".safetensors"
DENSE_FILE = f"model{SUFFIX}"  # if there is only one
DENSE_PATTERN = f"model{{suffix}}{SUFFIX}"
DENSE_INDEX = f"{DENSE_FILE}.index.json"
PACKED_INDEX = f"packed{SUFFIX}.index.json"  # always written

# Shell patterns of the files of weights and their indexes.
WEIGHT_FILES = (
    DENSE_FILE, f"model-[0-9]*-of-[0-9]*{SUFFIX}", DENSE_INDEX, f"packed-[0-9]*-of-[0-9]*{SUFFIX}", PACKED_INDEX,
)  # fmt: skip

# Endings of weight files, of all frameworks and tools.
FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
WEIGHT_SUFFIXES = (SUFFIX, ".index.json", *FOREIGN_SUFFIXES)
