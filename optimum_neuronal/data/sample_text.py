"""Text that a language model writes itself, to calibrate and to train with: in its own language, without a download."""

import copy
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..common.notes import progress
from ..common.torch_state import inference, preserve_rng_state
from ..common.validation import check_count, check_number
from ..compat.hf_private import execution_device
from ..files.records import Records
from .conversations import conversation_of, encode_prompt, find_template, render
from .token_windows import resolve_seq_length, text_tokenizer


BATCH_SIZE = 32  # samples that are written at a time; another number would give other text
SEED_STRIDE = 2**20  # from one seed to the next, so that no two give the same batch
NUM_SAMPLES, MAX_NEW_TOKENS, TEMPERATURE, TOP_P = 1000, 512, 1.0, 0.95  # defaults
QUESTION = 128  # tokens of a user's turn that the model writes, at most
PLACEHOLDER = "a7c1e5b9d3f2"  # in the place of the user's turn, to find what surrounds it

Row = dict[str, Any]  # of a dataset: `text`, or `messages` and perhaps `tools`


def sample_text(
    model: PreTrainedModel,
    tokenizer: Any,
    num_samples: int | None = None,
    *,
    prompts: Sequence[Any] | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = 0,
    records: Records | None = None,
) -> Iterator[Row]:
    """Yield what a dense model writes: conversations if its tokenizer has a chat template, else documents.

    Without prompts, the model first writes the user's turn of a conversation and then the answer (Xu et al., Magpie, 2024).
    Empty turns and documents are left out.

    ```python
    text = datasets.Dataset.from_list([*sample_text(dense, tokenizer, 1000)])
    ```

    Args:
        model (`PreTrainedModel`): a model with a language-model head.
        tokenizer: the model's tokenizer or processor.
        num_samples (`int`, *optional*): conversations or documents to write. None: one for each prompt, or else 1000.
        prompts (`Sequence`, *optional*):
            What the model answers, in turn: texts, or conversations whose last turn is the user's. Without a chat template,
            it continues texts.
        max_new_tokens (`int`): tokens in each answer or document, at most.
        temperature (`float`): from 0.01 to 100; 1 is the model's own distribution.
        top_p (`float`): draw from the likeliest tokens whose probabilities sum to this, in (0, 1].
        seed (`int`): of the draws. Equal seeds give equal text on devices of one kind.
        records ([`Records`], *optional*): where to record what is written, so that an interrupted call can continue.

    Raises:
        `ValueError`: an argument is out of its range, the prompts do not fit the model, or the model writes nothing.
    """
    check_sampling(num_samples, max_new_tokens, temperature, top_p)
    draw = {"do_sample": True, "temperature": float(temperature), "top_p": float(top_p), "top_k": 0}
    tokenizer = copy.deepcopy(tokenizer)  # a call changes truncation and padding in it
    writer = Writer(model, tokenizer, prompts, max_new_tokens, draw)
    count = num_samples or len(prompts or ()) or NUM_SAMPLES
    records, empty = records or Records(), True
    for start in progress(range(0, count, BATCH_SIZE), "writing text", "batch"):

        def write(first: int = start) -> tuple[list[Row], dict]:
            with preserve_rng_state(), inference(model):
                torch.manual_seed((seed * SEED_STRIDE + first) % 2**63)
                return writer.write(range(first, min(first + BATCH_SIZE, count))), {}

        rows, _ = records.recorded(f"samples-{start}", write)
        empty = empty and not rows
        yield from rows
    if empty:
        raise ValueError(f"{type(model).__name__} wrote {count} empty samples: expected a model that writes text.")


def check_sampling(num_samples: int | None, max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raise `ValueError` or `TypeError` if an argument of [`sample_text`] is out of its range."""
    check_count("num_samples", 1 if num_samples is None else num_samples, 1)
    check_count("max_new_tokens", max_new_tokens, 1)
    check_number("temperature", temperature, 0.01, 100)
    check_number("top_p", top_p, 0, 1, above=True)


class Writer:
    """Writes documents, or conversations if the tokenizer has a chat template. Prompts are checked when it is made."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Any] | None, most: int, draw: dict[str, Any]
    ):
        self.model, self.tokenizer, self.draw = model, text_tokenizer(tokenizer), draw
        self.most, self.question = most, min(QUESTION, most)  # tokens of an answer, and of a user's turn
        ends = model.generation_config.eos_token_id
        # Tokens that end a turn or a document.
        self.stops = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        self.template = find_template(tokenizer)
        if self.template is not None:
            self.before, self.after = self._frame()
            self.stops |= {*self._ids(self.after)[:1]} & {*self.tokenizer.all_special_ids}
        elif not prompts:
            prompts = [""]
        self.first = next(i for i in (self.tokenizer.bos_token_id, *sorted(self.stops), 0) if i is not None)
        self.prompts = [self._prompt(prompt, f"prompt {number}") for number, prompt in enumerate(prompts or ())]
        lengths = [len(ids) for _, ids in self.prompts] or [len(self._prompt(PLACEHOLDER, "")[1]) + self.question]
        resolve_seq_length(model.config, max(lengths) + most, "Prompts with their answers of up to")

    def _frame(self) -> tuple[str, str]:
        """Return the chat template's text before and after a user's turn."""
        text, _ = render([{"role": "user", "content": PLACEHOLDER}], self.template, "a user's turn")
        before, *after = text.split(PLACEHOLDER)
        if len(after) != 1:
            raise ValueError("The chat template doesn't show a user's turn once: set another tokenizer.chat_template.")
        return before, after[0].strip()

    def _prompt(self, prompt: Any, name: str) -> tuple[Row, list[int]]:
        """Return the row that an answer completes, and the token ids that the answer follows."""
        ids = encode_prompt(self.template or self.tokenizer, prompt, name) if prompt else [self.first]
        if self.template is None:
            return {"text": prompt}, ids
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages, tools = conversation_of(chat, name)
        return {"messages": messages, **tools}, ids

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def write(self, numbers: range) -> list[Row]:
        """Return the samples of these numbers that are not empty."""
        prompts = [self.prompts[n % len(self.prompts)] for n in numbers] if self.prompts else self._ask(len(numbers))
        rows = []
        for (row, _), answer in zip(prompts, self._continue([ids for _, ids in prompts], self.most)):
            if self._text(answer) and "messages" in row:
                answered = {"role": "assistant", "content": self._text(answer)}
                rows.append({**row, "messages": [*row["messages"], answered]})
            elif self._text(answer):
                rows.append({"text": self._text([*self._ids(row["text"]), *answer])})
        return rows

    def _ask(self, count: int) -> list[tuple[Row, list[int]]]:
        """Return prompts that the model writes itself."""
        turns = self._continue([self._ids(self.before) or [self.first]] * count, self.question)
        texts = [self._text(turn) for turn in turns]
        texts = [(text.split(self.after)[0] if self.after else text).strip() for text in texts]
        return [self._prompt(text, "a question") for text in texts if text]

    def _continue(self, prompts: list[list[int]], most: int) -> list[list[int]]:
        """Return the tokens that follow each prompt, up to the first one that ends it."""
        if not prompts:
            return []
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
        return [[*takewhile(lambda token: token not in self.stops, row)] for row in written[:, longest:].tolist()]
