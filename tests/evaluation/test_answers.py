import pytest
from conftest import make_model

from optimum_neuronal.evaluation.answers import answer


def test_token_types_are_left_out(tokenizer):
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in tokenizer("a")
    assert isinstance(answer(make_model("llama", vocab_size=256), tokenizer, "Once", 2), str)


def test_a_template_that_refuses_the_prompt(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('Where is the system message?') }}"
    with pytest.raises(ValueError, match="refuses a single user message: Where is the system message"):
        answer(make_model("llama", vocab_size=256), tokenizer, "Once")
