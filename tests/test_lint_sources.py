import ast

import pytest
from lint_sources import lint


@pytest.mark.parametrize(
    "code, message",
    [
        ("from transformers import modeling_utils", "transformers.modeling_utils is private"),
        ("import transformers.modeling_utils", "is private: offer in compat/hf_private.py"),
        ("from transformers.trainer_callback import ExportableState", "ExportableState is private"),
        ("from transformers.utils import hub", "is private: offer in compat/hf_private.py"),
        ("getattr(model, 'hf_device_map')", "hf_device_map is private"),
        ("module.is_transposed", "is_transposed is private"),
        ("module._hf_hook", "offer in compat/accelerate.py"),
        ("import peft", "peft is imported"),
        ("layer.lora_A", "offer in compat/peft.py"),
        ("f'{stem}-{number:05}.safetensors'", "'.safetensors' is the name of a file"),
        ("path / 'README.md'", "'README.md' is the name of a file"),
        ("logging.get_logger(__name__)", "import get_logger from system/notes.py"),
        ("logging.tqdm(range(3), desc='Perplexity')", "a progress bar without disable=None"),
    ],
)
def test_offences(code, message):
    ((_, found),) = lint("model/rows.py", ast.parse(code))
    assert message in found


def test_what_is_allowed():
    for code in (
        "from transformers import PreTrainedModel",
        "from transformers.utils import logging",
        "import transformers",
        "logging.tqdm(range(3), disable=None)",
        "hf_private.is_transposed(module)",
        "f'{path} has no config.json'; 'tokenizer.json'",
        "'''The file config.json.'''",
    ):
        assert not list(lint("model/rows.py", ast.parse(code))), code
    assert not list(lint("compat/accelerate.py", ast.parse("module._hf_hook")))
