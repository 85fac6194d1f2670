"""Text that a language model writes itself, to calibrate and to train with: in its own language, without a download."""

import math
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..common.progress import progress
from ..common.torch_state import inference, preserve_rng_state
from ..common.validation import check_count, check_number
from ..compat.hf_private import execution_device
from ..files.records import Records
from .token_windows import resolve_seq_length, text_tokenizer


BATCH_SIZE = 32  # samples that are written at a time; another number would give other text
SEED_STRIDE = 2**20  # from one seed to the next, so that no two give the same batch
NUM_SAMPLES, MAX_LENGTH, TEMPERATURE, TOP_P = 1000, 512, 1.0, 0.95  # defaults
QUESTION = 128  # tokens of a user's turn, at most
PLACEHOLDER = "QUESTION"  # in the place of the user's turn, to find what surrounds it

Row = dict[str, Any]  # of a dataset: `messages` or `text`


def sample_text(
    model: PreTrainedModel,
    tokenizer: Any,
    num_samples: int = NUM_SAMPLES,
    *,
    max_length: int = MAX_LENGTH,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
    records: Records | None = None,
) -> Iterator[Row]:
    """Yield what a dense model writes: conversations if its tokenizer has a chat template, else documents.

    In a conversation, the model first writes the user's turn and then the answer (Xu et al., Magpie, 2024). Empty turns and
    documents are left out.

    ```python
    text = datasets.Dataset.from_list([*sample_text(dense, tokenizer, 1000)])
    ```

    Args:
        model (`PreTrainedModel`): a model with a language-model head.
        tokenizer: the model's tokenizer or processor.
        num_samples (`int`): conversations or documents to write.
        max_length (`int`): tokens in each, at most.
        temperature (`float`): above 0; 1 is the model's own distribution.
        top_p (`float`): draw from the likeliest tokens whose probabilities sum to this, in (0, 1].
        seed (`int`): of the draws. Equal seeds give equal text on devices of one kind.
        records ([`Records`], *optional*): where to record what is written, so that an interrupted call can continue.

    Raises:
        `ValueError`: an argument is out of its range, or the model writes nothing.
    """
    check_sampling(num_samples, temperature, top_p)
    draw = {"do_sample": True, "temperature": float(temperature), "top_p": float(top_p), "top_k": 0}
    writer = Writer(model, text_tokenizer(tokenizer), resolve_seq_length(model.config, max_length), draw)
    records, empty = records or Records(), True
    for start in progress(range(0, num_samples, BATCH_SIZE), "writing text", "batch"):

        def write(first: int = start) -> tuple[list[Row], dict]:
            with preserve_rng_state(), inference(model):
                torch.manual_seed((seed * SEED_STRIDE + first) % 2**63)
                return writer.write(min(BATCH_SIZE, num_samples - first)), {}

        rows, _ = records.recorded(f"samples-{start}", write)
        empty = empty and not rows
        yield from rows
    if empty:
        raise ValueError(
            f"{type(model).__name__} wrote {num_samples} empty samples: expected a model that writes text."
        )


def check_sampling(num_samples: int, temperature: float, top_p: float) -> None:
    """Raise `ValueError` or `TypeError` if an argument of [`sample_text`] is out of its range."""
    check_count("num_samples", num_samples, 1)
    check_number("temperature", temperature, 0, math.inf, above=True)
    check_number("top_p", top_p, 0, 1, above=True)


class Writer:
    """Writes samples: documents, or conversations if the tokenizer has a chat template."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, max_length: int, draw: dict[str, Any]):
        self.model, self.tokenizer, self.max_length, self.draw = model, tokenizer, max_length, draw
        ends = model.generation_config.eos_token_id
        # Tokens that end a turn or a document.
        self.stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        if tokenizer.chat_template:
            self.before, self.after = self._frame()
            self.stops |= {*self._ids(self.after)[:1]} & {*tokenizer.all_special_ids}
        self.first = next(i for i in (tokenizer.bos_token_id, *sorted(self.stops), 0) if i is not None)

    def _frame(self) -> tuple[str, str]:
        """Return the chat template's text before and after a user's turn."""
        messages = [{"role": "user", "content": PLACEHOLDER}]
        before, mark, after = self.tokenizer.apply_chat_template(messages, tokenize=False).partition(PLACEHOLDER)
        if not mark:
            raise ValueError("The chat template leaves out the user's turn: set another tokenizer.chat_template.")
        return before, after.strip()

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def write(self, count: int) -> list[Row]:
        """Return up to `count` samples that are not empty."""
        if not self.tokenizer.chat_template:
            return [{"text": text} for text in self._continue([[self.first]] * count, self.max_length - 1) if text]
        turns = self._continue([self._ids(self.before) or [self.first]] * count, min(QUESTION, self.max_length // 2))
        turns = [(turn.split(self.after)[0] if self.after else turn).strip() for turn in turns]
        asked = [[{"role": "user", "content": turn}] for turn in turns if turn]
        if not asked:
            return []
        prompts = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        answers = self._continue(prompts, max(1, self.max_length - max(map(len, prompts))))
        rows = zip(asked, answers)
        return [{"messages": [*user, {"role": "assistant", "content": answer}]} for user, answer in rows if answer]

    def _continue(self, prompts: list[list[int]], most: int) -> list[str]:
        """Return what follows each prompt, up to the first token that ends it, without special tokens."""
        longest, stops = max(map(len, prompts)), sorted(self.stops)
        padding = next(i for i in (self.tokenizer.pad_token_id, *stops, 0) if i is not None)
        ids = torch.tensor([[padding] * (longest - len(prompt)) + prompt for prompt in prompts])
        used = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = execution_device(self.model.get_input_embeddings())
        how = GenerationConfig(**self.draw, max_new_tokens=most, eos_token_id=stops or None, pad_token_id=padding)
        own, self.model.generation_config = self.model.generation_config, GenerationConfig()  # it would complete `how`
        try:
            written = self.model.generate(ids.to(device), attention_mask=used.to(device), generation_config=how)
        finally:
            self.model.generation_config = own
        texts = [takewhile(lambda token: token not in self.stops, row) for row in written[:, longest:].tolist()]
        return [self.tokenizer.decode([*text], skip_special_tokens=True).strip() for text in texts]
