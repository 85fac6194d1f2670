"""How fast a sparse model computes with dense and with packed weights, and what memory each takes."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ..checkpoint.hub import public_name
from ..display import format_bytes, format_table
from ..engine.capture import inference
from ..validation import check_count
from .quantized import footprint


PROMPT = 16  # tokens in front of those that are generated
FASTER = 1.02  # from which ratio on a difference is more than chance


@dataclass(frozen=True)
class Timing:
    """One kind of work, done by all forms of a model in turns.

    Args:
        work (`str`): `"decode, batch 4"` or `"prefill, 512 tokens"`.
        dense, packed (`float`): tokens per second of the whole batch, medians.
        lowest, highest (`float`): of the rounds' ratios packed to dense.
        ratio (`float`): their median: above 1, packed weights are faster.
        others, other_ratios (`dict[str, float]`): the same of the model's other forms, by their names.
    """

    work: str
    dense: float
    packed: float
    ratio: float
    lowest: float
    highest: float
    others: dict[str, float] = field(default_factory=dict)
    other_ratios: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SpeedReport:
    """What [`measure_speed`] found. `print(report)` shows it as a table.

    Args:
        model (`str`): what was measured.
        dtype (`str`), device (`str`), threads (`int`): of the computation.
        timings (`list[Timing]`): one per kind of work.
        dense_bytes, packed_bytes (`int`): of the models' parameters and buffers.
        resident (`dict[str, int]`):
            Bytes that the process grew by with each model, if known: `"dense"`, `"packed"`, and other forms.
        other_bytes (`dict[str, int]`): as `packed_bytes`, of the other forms: `"4 bits, int8"`, `"torchao int4"`.
        left_out (`dict[str, str]`): name of a form -> why there is none.
    """

    model: str
    dtype: str
    device: str
    threads: int
    timings: list[Timing]
    dense_bytes: int
    packed_bytes: int
    resident: dict[str, int]
    other_bytes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-serialisable."""
        return asdict(self)

    @property
    def verdict(self) -> str:
        """What the figures say, whichever way they fall."""
        slower = [timing.work for timing in self.timings if timing.ratio < 1 / FASTER]
        faster = [timing.work for timing in self.timings if timing.ratio > FASTER]
        found = [("faster", faster), ("slower", slower)]
        told = [f"Packed weights are {how} here for: {'; '.join(work)}." for how, work in found if work]
        return " ".join(told or ["Packed weights are neither faster nor slower here."])

    def __str__(self) -> str:
        columns = [part for name in self.other_bytes for part in (name, "times")]
        header = ["tokens per second", "dense", "packed", "times", "lowest and highest", *columns]
        rows = [_speeds(timing) for timing in self.timings]
        model = {"dense": self.dense_bytes, "packed": self.packed_bytes, **self.other_bytes}
        sizes = [_sizes("model", model), *([_sizes("resident", self.resident)] if self.resident else [])]
        memory = format_table(["memory", "dense", "packed", "times", *columns], sizes)
        about = f"{self.model}, {self.dtype} on {self.device}, {self.threads} thread{'s' * (self.threads > 1)}"
        left_out = [f"Not shown: {name}: {why}." for name, why in self.left_out.items()]
        return "\n\n".join([about, format_table(header, rows), memory, "\n".join([self.verdict, *left_out])])


def _speeds(timing: Timing) -> list[str]:
    """A row of the table of speeds."""
    own = [f"{timing.dense:.1f}", f"{timing.packed:.1f}", f"{timing.ratio:.2f}"]
    others = [
        text for name, rate in timing.others.items() for text in (f"{rate:.1f}", f"{timing.other_ratios[name]:.2f}")
    ]
    return [timing.work, *own, f"{timing.lowest:.2f} to {timing.highest:.2f}", *others]


def _sizes(name: str, bytes_of: dict[str, int]) -> list[str]:
    """A row of the table of memory."""
    dense, *others = bytes_of.values()
    row = [name, format_bytes(dense)]
    for size in others:
        row += [format_bytes(size), f"{size / max(1, dense):.2f}"]
    return row


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
