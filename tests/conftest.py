"""Fixtures: tiny models, made from the installed transformers' own config classes, token ids, a tokenizer."""

import copy
import gc
import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches the network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models as small as these only lose by more; for processes of tests too

import pytest
import torch
import transformers
from families import FAMILIES, VOCABULARY
from texts import VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers, processors


transformers.logging.enable_propagation()  # so that pytest's caplog sees notes
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # what is imported stays: tests that collect garbage need not look through it

# A few, for tests that need not run on all: separate and fused projections, grouped queries, parallel blocks, experts.
FEW = ("gpt2", "gpt_neox", "llama", "llama4_text", "mistral", "mixtral", "opt", "phi", "qwen3")

_MODELS: dict[tuple, transformers.PreTrainedModel] = {}  # made by `make_model` in this session


def make_model(family: str, seed: int = 0, **overrides) -> transformers.PreTrainedModel:
    """Return a randomly initialised model of a family, in float32; larger weights than usual, so that blocks matter.

    Each is made once for a session and copied. Torch's random state afterwards depends on the seed alone.
    """
    model = copy.deepcopy(_model(family, seed, tuple(sorted(overrides.items(), key=lambda item: item[0]))))
    torch.manual_seed(seed)
    return model


def _model(family: str, seed: int, overrides: tuple) -> transformers.PreTrainedModel:
    key = (family, seed, repr(overrides))
    if key not in _MODELS:
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family].config, **dict(overrides)})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        _MODELS[key] = model.eval()
    return _MODELS[key]


def make_model_on_disk(folder, family: str) -> transformers.PreTrainedModel:
    """Return a model whose weights stay in files of a folder, which has the dense checkpoint too."""
    make_model(family).save_pretrained(folder / "dense")
    options = {"device_map": {"": "disk"}, "offload_folder": folder / "offload"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "dense", **options)


def memory_of(fields: dict) -> dict:
    """Take from fields of a config, in place, the arguments of `prune` that change memory and speed alone."""
    return {name: fields.pop(name) for name in ("batch_size", "max_hidden_bytes") if name in fields}


@pytest.fixture(autouse=True)
def progress_is_shown() -> None:
    """Whatever an example or a command with --quiet has set before."""
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(params=FEW)
def any_model(request) -> transformers.PreTrainedModel:
    return make_model(request.param)


@pytest.fixture
def llama() -> transformers.PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def batched(monkeypatch) -> None:
    """Let prunes on a CPU run sequences in batches, as on an accelerator."""
    monkeypatch.setattr("optimum_neuronal.pruning.prepare.ONE_AT_A_TIME", ())


@pytest.fixture
def ids() -> torch.Tensor:
    return make_ids()


def make_ids() -> torch.Tensor:
    """Return token ids of 12 sequences of 16 tokens."""
    return torch.randint(0, VOCABULARY, (12, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def make_tokenizer(offset=0, **special) -> transformers.PreTrainedTokenizerFast:
    """The word "w7" is the id 7 + offset, anything else 255; it warns above 4 tokens, as that is what its model admits.

    With `bos_token="w9"`, every text begins with the id 9.
    """
    words = {f"w{i}": (i + offset) % (VOCAB - 1) for i in range(VOCAB - 1)} | {"<unk>": VOCAB - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos := special.get("bos_token"):
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, words[bos])])
    own = {"unk_token": "<unk>", "model_max_length": 4, **special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **own)
