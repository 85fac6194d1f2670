"""Answers of a model to a prompt, to see what pruning did to it."""

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compat.hf_private import execution_device


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int = 80) -> str:
    """Return a model's greedy answer to a prompt, unedited. Without a chat template, the model continues the prompt."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        options = {"add_generation_prompt": True, "return_dict": True}
        try:
            inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", **options)
        except TemplateError as error:
            raise ValueError(f"The tokenizer's chat template refuses a single user message: {error}") from error
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = inputs.to(execution_device(model.get_input_embeddings()))
    inputs.pop("token_type_ids", None)  # decoders have none
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
