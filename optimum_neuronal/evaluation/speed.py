"""Speed and memory of a sparse model with dense and with packed weights."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ..blocks.block_inputs import inference
from ..checkpoint.hub import public_name
from ..common.display import format_bytes, format_table
from ..common.validation import check_count
from .quantized import footprint


PROMPT = 16  # tokens before the generated ones
FASTER = 1.02  # a smaller ratio may be chance


@dataclass(frozen=True)
class Timing:
    """Speed of all forms of a model in one kind of work, done in turns.

    Args:
        work (`str`): `"decode, batch 4"` or `"prefill, 512 tokens"`.
        dense, packed (`float`): tokens per second of the whole batch, medians.
        ratio (`float`): median of the rounds' ratios packed to dense: above 1, packed weights are faster.
        lowest, highest (`float`): of these ratios.
        others, other_ratios (`dict[str, float]`): tokens per second, and ratios to dense, of other forms by name.
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
    """Outcome of [`measure_speed`]. `print(report)` shows it as a table.

    Args:
        model (`str`): name of the model.
        dtype (`str`), device (`str`), threads (`int`): of the computation.
        timings (`list[Timing]`): one per kind of work.
        dense_bytes, packed_bytes (`int`): of the models' parameters and buffers.
        resident (`dict[str, int]`):
            Growth of the process in bytes with each form, if known: `"dense"`, `"packed"`, and other forms.
        other_bytes (`dict[str, int]`): bytes of parameters and buffers of other forms: `"4 bits, int8"`, `"torchao int4"`.
        left_out (`dict[str, str]`): name of a form -> reason why it was not measured.
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
        """Return the whole report, JSON-serialisable."""
        return asdict(self)

    @property
    def verdict(self) -> str:
        """The result in a sentence or two."""
        slower = [timing.work for timing in self.timings if timing.ratio < 1 / FASTER]
        faster = [timing.work for timing in self.timings if timing.ratio > FASTER]
        kinds = [("faster", faster), ("slower", slower)]
        found = [f"Packed weights are {how} here for: {'; '.join(work)}." for how, work in kinds if work]
        return " ".join(found or ["Packed weights are neither faster nor slower here."])

    def __str__(self) -> str:
        columns = [part for name in self.other_bytes for part in (name, "times")]
        speeds = []
        for timing in self.timings:
            row = [timing.work, f"{timing.dense:.1f}", f"{timing.packed:.1f}", f"{timing.ratio:.2f}"]
            row.append(f"{timing.lowest:.2f} to {timing.highest:.2f}")
            for name, rate in timing.others.items():
                row += [f"{rate:.1f}", f"{timing.other_ratios[name]:.2f}"]
            speeds.append(row)
        header = ["tokens per second", "dense", "packed", "times", "lowest and highest", *columns]
        sizes = [_sizes("model", {"dense": self.dense_bytes, "packed": self.packed_bytes, **self.other_bytes})]
        sizes += [_sizes("resident", self.resident)] if self.resident else []
        memory = format_table(["memory", "dense", "packed", "times", *columns], sizes)
        about = f"{self.model}, {self.dtype} on {self.device}, {self.threads} thread{'s' * (self.threads > 1)}"
        left_out = [f"Not shown: {name}: {why}." for name, why in self.left_out.items()]
        return "\n\n".join([about, format_table(header, speeds), memory, "\n".join([self.verdict, *left_out])])


def _sizes(name: str, bytes_of: dict[str, int]) -> list[str]:
    """Return a row of the table of memory."""
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
    """Time the forms of one model in turns, so that other load on the machine slows all of them.

    Args:
        dense, packed (`PreTrainedModel`): a sparse model with dense weights, and the same model with packed ones.
        batches (`Sequence[int]`): numbers of sequences to generate at a time.
        prompt_tokens (`int`): length of the prefill.
        new_tokens (`int`): tokens to generate for each sequence.
        rounds (`int`): number of timings of each kind of work; one more goes before, to warm up.
        resident (`dict[str, int]`, *optional*): growth of the process with each form, for the report.
        others (`Mapping[str, PreTrainedModel]`, *optional*):
            Name -> the model in another form: with quantised values, see [`sparsify`], or quantised by torchao.
        left_out (`Mapping[str, str]`, *optional*): name of a form -> reason why it could not be made, for the report.

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
        timings = [_time_in_turns(name, tokens, seconds, models, rounds) for name, tokens, seconds in work]
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


class _TokenTimes(StoppingCriteria):
    """Record of the time at which each token is finished; stops nothing."""

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
    """Return the seconds in which a batch of sequences grows by `new_tokens` each, without the prefill."""
    ids, times = _random_tokens(model, batch, PROMPT), _TokenTimes(model.device, clock)
    with _plain_generation(model):
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1 + new_tokens,
            stopping_criteria=StoppingCriteriaList([times]),
        )
    return times.seen[-1] - times.seen[0]


def prefill_seconds(model: PreTrainedModel, tokens: int) -> float:
    """Return the seconds of one forward of one sequence."""
    ids = _random_tokens(model, 1, tokens)
    _wait_for(model.device)
    start = time.perf_counter()
    model(input_ids=ids)
    _wait_for(model.device)
    return time.perf_counter() - start


def _time_in_turns(
    work: str,
    tokens: int,
    seconds: Callable[[PreTrainedModel], float],
    models: Mapping[str, PreTrainedModel],
    rounds: int,
) -> Timing:
    """Time one kind of work; `models` holds the dense one first, then the packed one."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in logging.tqdm(range(rounds + 1), desc=work, unit="round", leave=False, disable=None):
        for name, model in models.items():
            taken = seconds(model)
            if number:
                times[name].append(taken)
    rates = {name: tokens / statistics.median(own) for name, own in times.items()}
    ratios = {name: [one / other for one, other in zip(times["dense"], own)] for name, own in times.items()}
    medians = {name: statistics.median(own) for name, own in ratios.items()}
    dense, packed = rates.pop("dense"), rates.pop("packed")
    lowest, highest = min(ratios["packed"]), max(ratios["packed"])
    others = {name: medians[name] for name in rates}
    return Timing(work, dense, packed, medians["packed"], lowest, highest, rates, others)


def _random_tokens(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    """Return random ids of shape (batch, length) on the model's device, always the same."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(model.device)


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Generate greedily and without an end token, whatever the checkpoint's generation config; put that back."""
    before = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, do_sample=False)
    try:
        yield
    finally:
        model.generation_config = before


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
