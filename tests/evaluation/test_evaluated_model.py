import pytest
import torch
from conftest import make_model

from optimum_neuronal.evaluation.evaluated_model import as_model, check_language_model


def test_a_model_that_is_loaded_stays_as_it_is(llama):
    assert as_model(llama, "tokenizer") == (llama, "tokenizer")


def test_a_named_model_is_loaded_with_its_tokenizer_if_it_has_one(llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path)
    model, none = as_model(tmp_path)
    assert torch.equal(model.lm_head.weight, llama.lm_head.weight) and none is None
    tokenizer.save_pretrained(tmp_path)
    assert as_model(str(tmp_path))[1].get_vocab() == tokenizer.get_vocab()


def test_what_predicts_nothing_is_refused(llama):
    check_language_model(llama, "and so on")
    with pytest.raises(ValueError, match="LlamaModel has no causal language-model head, and so on: if"):
        check_language_model(llama.model, "and so on")
    with pytest.raises(TypeError, match="model is 'llama'"):
        check_language_model("llama", "and so on")
    with pytest.raises(ValueError, match="on the meta device"):
        check_language_model(make_model("llama").to("meta"), "and so on")
