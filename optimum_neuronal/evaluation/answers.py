"""Answers: what the dense model says, how closely a sparse model predicts it, and what the sparse model says."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.display import format_table
from ..common.notes import progress
from ..common.torch_state import inference
from ..common.validation import check_count
from ..compat.hf_private import execution_device
from ..data.conversations import conversation_of, encode_prompt
from ..data.token_windows import longest_sequence, resolve_seq_length


MAX_NEW_TOKENS = 64
EXAMPLES = 3  # prompts whose answers are shown
# Whatever a model's generation_config says.
GREEDY = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
PROMPTS = Path(__file__).with_name("prompts.txt")

Prompt = str | list[dict[str, Any]]  # text, or a conversation whose last turn is the user's


@dataclass(frozen=True, repr=False)
class Answers:
    """How a sparse model compares with the dense model on the dense model's greedy answers.

    Args:
        kl (`float`): mean KL divergence of the sparse model's predictions from the dense model's, in nats per token.
        agreement (`float`): share of the dense model's tokens that the sparse model predicts too, in [0, 1].
        prompts (`int`): number of prompts.
        tokens (`int`): number of tokens in the dense model's answers.
        examples (`list[dict]`): the first prompts, each with the greedy answers of both models: `prompt`, `dense`, `sparse`.
    """

    kl: float
    agreement: float
    prompts: int
    tokens: int
    examples: list[dict[str, str]]

    def __repr__(self) -> str:
        rows = [
            ["KL divergence from the dense model", f"{self.kl:.3f} nats per token"],
            ["same token as the dense model", f"{self.agreement:.1%}"],
            ["measured on", f"{self.prompts} answers of the dense model, {self.tokens:,} tokens"],
        ]
        shown = ("{prompt}\n  dense:  {dense}\n  sparse: {sparse}".format(**one) for one in self.examples)
        return "\n\n".join([format_table(["", "answers"], rows), *shown])


def compare_answers(
    sparse: PreTrainedModel,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None = None,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Answers:
    """Compare a sparse model with its dense model on the dense model's greedy answers.

    Perplexity and multiple-choice accuracy flatter pruned models: this measures and shows what they say.

    Args:
        sparse, dense (`PreTrainedModel`): models with one vocabulary.
        tokenizer (`PreTrainedTokenizerBase`): their tokenizer.
        prompts (`Sequence[str]` or `Sequence[list[dict]]`, *optional*):
            Texts, or conversations whose last turn is the user's. A tokenizer without a chat template takes texts, which
            the model continues. None: 48 built-in questions.
        max_new_tokens (`int`): tokens in an answer, at most.

    Raises:
        `ValueError`: the list of prompts is empty, the chat template raises, or the vocabularies differ.
    """
    return DenseAnswers(dense, tokenizer, prompts, max_new_tokens).compare(sparse)


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, max_new_tokens: int = 80
) -> str:
    """Return a model's greedy answer to a prompt. Without a chat template, the model continues the prompt."""
    question = encode(copy.deepcopy(tokenizer), prompt)  # a call changes truncation and padding
    return decode(tokenizer, _generate(model, question, max_new_tokens))


class DenseAnswers:
    """Greedy answers of a dense model with its predictions for each token, kept for any number of sparse models.

    The log-probabilities are kept in float16 on the CPU: 2 bytes for each answer token and entry of the vocabulary.
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
    ):
        check_count("max_new_tokens", max_new_tokens, 1)
        if tokenizer is None or not dense.can_generate():
            raise ValueError(f"Answers need a tokenizer and a model that generates text, not {type(dense).__name__}.")
        prompts = built_in_prompts(tokenizer) if prompts is None else prompts
        if not prompts:
            raise ValueError("There are no prompts: expected at least one.")
        self.tokenizer, self.prompts, self.max_new_tokens = tokenizer, prompts, max_new_tokens
        tokenizer = copy.deepcopy(tokenizer)  # a call changes truncation and padding
        self.questions = [encode(tokenizer, prompt) for prompt in prompts]
        longest = max(map(len, self.questions)) + 1
        resolve_seq_length(dense.config, longest, "Prompts with the first token of their answers, up to")
        self.answers = [
            _generate(dense, ids, max_new_tokens)
            for ids in progress(self.questions, "answers of the dense model", "prompt")
        ]
        self.log_probabilities = [found.half().cpu() for found in self._predictions(dense)]

    def compare(self, sparse: PreTrainedModel) -> Answers:
        """Return how closely a sparse model predicts these answers, and its own answers to the first prompts."""
        divergence, same, tokens = 0.0, 0, sum(map(len, self.answers))
        for expected, found in zip(self.log_probabilities, self._predictions(sparse)):
            if found.shape != expected.shape:
                raise ValueError(
                    f"The sparse model predicts {found.shape[1]} tokens, the dense model {expected.shape[1]}."
                )
            expected = expected.to(found.device, torch.float32)
            terms = torch.where(expected.exp() > 0, expected.exp() * (expected - found), 0)
            divergence += terms.double().sum().item()
            same += int((found.argmax(-1) == expected.argmax(-1)).sum())
        examples = []
        for prompt, question, theirs in zip(self.prompts[:EXAMPLES], self.questions, self.answers):
            ours = _generate(sparse, question, self.max_new_tokens)
            said = {name: decode(self.tokenizer, ids) for name, ids in (("dense", theirs), ("sparse", ours))}
            turn = prompt if isinstance(prompt, str) else conversation_of(prompt, "a prompt")[0][-1]["content"]
            examples.append({"prompt": turn, **said})
        return Answers(divergence / tokens, same / tokens, len(self.prompts), tokens, examples)

    def _predictions(self, model: PreTrainedModel) -> Iterator[torch.Tensor]:
        """Yield the log-probabilities that a model gives before each token of an answer, (tokens, vocabulary)."""
        device = execution_device(model.get_input_embeddings())
        for question, given in zip(self.questions, self.answers):
            with inference(model):
                logits = model(input_ids=torch.cat([question, given])[None].to(device), use_cache=False).logits[0]
            yield logits[len(question) - 1 : -1].float().log_softmax(-1)


def built_in_prompts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return 48 questions. Without a chat template, each is a text to continue."""
    questions = PROMPTS.read_text(encoding="utf-8").splitlines()
    return questions if tokenizer.chat_template else [f"Question: {question}\nAnswer:" for question in questions]


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> torch.Tensor:
    """Return the token ids of a prompt, (tokens,), see [`encode_prompt`]."""
    return torch.tensor(encode_prompt(tokenizer, prompt), dtype=torch.int64)


def decode(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True).strip()


def _generate(model: PreTrainedModel, question: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
    """Return the tokens that a model answers a prompt with, greedily: up to the end token, and no more than fit."""
    most = longest_sequence(model.config) or math.inf
    ids = question[None].to(execution_device(model.get_input_embeddings()))
    unused = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}  # of one sequence; without them, it warns
    with inference(model):
        tokens = model.generate(ids, max_new_tokens=min(max_new_tokens, most - len(question)), **GREEDY, **unused)
    return tokens[0, len(question) :].cpu()
