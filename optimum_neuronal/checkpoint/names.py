"""File names of a checkpoint. transformers and the Hub fix some; plain transformers does not look for the packed ones."""

FORMATS = ("dense", "packed")
QUANT_METHOD = "optimum_neuronal"  # of packed checkpoints; programs that do not know it name it in their errors

CONFIG = "config.json"  # without it, a directory is not a model
MODEL_CARD = "README.md"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
ADAPTER_CONFIG = "adapter_config.json"  # transformers loads an adapter in the same folder along with the model

SUFFIX = ".safetensors"
DENSE_FILE = f"model{SUFFIX}"  # if there is only one
DENSE_PATTERN = f"model{{suffix}}{SUFFIX}"
DENSE_INDEX = f"{DENSE_FILE}.index.json"
PACKED_INDEX = f"packed{SUFFIX}.index.json"  # always written

# Shell patterns. First of the files of weights and their indexes.
WEIGHT_FILES = (
    DENSE_FILE, f"model*-[0-9]*-of-[0-9]*{SUFFIX}", DENSE_INDEX, f"packed-[0-9]*-of-[0-9]*{SUFFIX}", PACKED_INDEX,
)  # fmt: skip

# What belongs to a model beside its weights, and is carried over whatever happens to these.
CARRIED = (
    "LICENSE*", "NOTICE*", "*.py", "custom_generate/*",
    # sentence-transformers: how hidden states become embeddings, in folders such as 1_Pooling
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[1-9]_[A-Z]*/*", "[1-9]_[A-Z]*/*/*",
    # a processor
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json",
    "chat_template.json",
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json", CHAT_TEMPLATE, "additional_chat_templates/*",
)  # fmt: skip
