"""How fast a sparse model computes with dense and with packed weights, and what memory each takes."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ..checkpoint.hub import public_name
from ..engine.capture import inference
from ..validation import check_count
from .quantized import footprint
from .speed_report import SpeedReport, Timing


PROMPT = 16  # tokens in front of those that are generated


def measure_speed(
    dense: PreTrainedModel,
    packed: PreTrainedModel,
    batches: Sequence[int] = (1, 4, 8),
    prompt_tokens: int = 512,
    new_tokens: int = 32,
    rounds: int = 5,
    resident: dict[str, int] | None = None,
    others: Mapping[str, PreTrainedModel] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> SpeedReport:
    """Times the forms of one model in turns, so that a machine's moods meet all.

    Args:
        dense, packed (`PreTrainedModel`): a sparse model with dense weights, and the same with packed ones.
        batches (`Sequence[int]`): sequences that are generated at a time.
        prompt_tokens (`int`): length of the prefill that is timed.
        new_tokens (`int`): tokens to generate for each sequence.
        rounds (`int`): how often each kind of work is done by both; one more goes before, to warm up.
        resident (`dict[str, int]`, *optional*): what the process grew by with each, for the report.
        others (`Mapping[str, PreTrainedModel]`, *optional*):
            Name -> the same model in another form: with values of few bits, see [`sparsify`], or quantised.
        left_out (`Mapping[str, str]`, *optional*): name of a form -> why it could not be made, for the report.

    Raises:
        `ValueError`, `TypeError`: a number that is below 1, or not whole.
    """
    numbers = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "rounds": rounds}
    for name, value in [*numbers.items(), *(("batches", batch) for batch in batches)]:
        check_count(name, value, 1)
    work: list[tuple[str, int, Callable[[PreTrainedModel], float]]] = [
        (f"decode, batch {batch}", batch * new_tokens, lambda model, b=batch: decode_seconds(model, b, new_tokens))
        for batch in batches
    ]
    work.append((f"prefill, {prompt_tokens} tokens", prompt_tokens, lambda m: prefill_seconds(m, prompt_tokens)))
    others = dict(others or {})
    models = {"dense": dense, "packed": packed, **others}
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(inference(model))
        timings = [_in_turns(name, tokens, seconds, models, rounds) for name, tokens, seconds in work]
    return SpeedReport(
        model=public_name(dense),
        dtype=str(dense.dtype).removeprefix("torch."),
        device=str(dense.device),
        threads=torch.get_num_threads(),
        timings=timings,
        dense_bytes=footprint(dense),
        packed_bytes=footprint(packed),
        resident=dict(resident or {}),
        other_bytes={name: footprint(model) for name, model in others.items()},
        left_out=dict(left_out or {}),
    )


class _Moments(StoppingCriteria):
    """Takes down when each token was finished, and stops nothing."""

    def __init__(self, device: torch.device, clock: Callable[[], float]):
        self.device, self.clock = device, clock
        self.seen: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        _wait_for(self.device)
        self.seen.append(self.clock())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def decode_seconds(
    model: PreTrainedModel, batch: int, new_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds that a batch of sequences takes to become so many tokens longer, its prefill not counted."""
    ids, moments = _tokens(model, batch, PROMPT), _Moments(model.device, clock)
    with _plain_generation(model):
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1 + new_tokens,
            stopping_criteria=StoppingCriteriaList([moments]),
        )
    return moments.seen[-1] - moments.seen[0]


def prefill_seconds(model: PreTrainedModel, tokens: int) -> float:
    """Seconds of one forward of one sequence."""
    ids = _tokens(model, 1, tokens)
    return _seconds(model, lambda: model(input_ids=ids))


def _in_turns(
    work: str,
    tokens: int,
    seconds: Callable[[PreTrainedModel], float],
    models: Mapping[str, PreTrainedModel],
    rounds: int,
) -> Timing:
    """Times one kind of work; `models` has the dense one first, then the packed one."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for number in logging.tqdm(range(rounds + 1), desc=work, unit="round", leave=False):
        for name, model in models.items():
            taken = seconds(model)
            if number:
                found[name].append(taken)
    rates = {name: tokens / statistics.median(times) for name, times in found.items()}
    ratios = {name: [one / other for one, other in zip(found["dense"], times)] for name, times in found.items()}
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    dense, packed = rates.pop("dense"), rates.pop("packed")
    packed_ratios = ratios["packed"]
    return Timing(
        work,
        dense,
        packed,
        medians["packed"],
        min(packed_ratios),
        max(packed_ratios),
        rates,
        {name: medians[name] for name in rates},
    )


def _tokens(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(model.device)


@contextmanager
def _plain_generation(model: PreTrainedModel):
    """Greedy, whatever the checkpoint's own generation config says; it is put back."""
    before = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, do_sample=False)
    try:
        yield
    finally:
        model.generation_config = before


def _seconds(model: PreTrainedModel, work: Callable[[], Any]) -> float:
    _wait_for(model.device)
    start = time.perf_counter()
    work()
    _wait_for(model.device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
