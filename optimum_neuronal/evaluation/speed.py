"""How fast a sparse model computes with dense and with packed weights, and what memory each takes."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ..checkpoint.origin import public_name
from ..decoder.packed_modules import packed_modules
from ..engine.capture import inference
from ..inference.coded_rows import CodedRows
from ..runtime.arguments import check_count
from ..runtime.quantities import format_bytes
from ..runtime.tables import format_table


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
        coded, coded_ratio (`float`, *optional*): the same of packed weights with values of few bits, if there are any.
    """

    work: str
    dense: float
    packed: float
    ratio: float
    lowest: float
    highest: float
    coded: float | None = None
    coded_ratio: float | None = None


@dataclass(frozen=True)
class SpeedReport:
    """What [`measure_speed`] found. `print(report)` shows it as a table.

    Args:
        model (`str`): what was measured.
        dtype (`str`), device (`str`), threads (`int`): of the computation.
        timings (`list[Timing]`): one per kind of work.
        dense_bytes, packed_bytes (`int`): of the models' parameters and buffers.
        resident (`dict[str, int]`): bytes that the process grew by with each model, `"dense"` and `"packed"`, if known.
        coded_bytes (`int`, *optional*): as `packed_bytes`, of the model with values of few bits.
        coded_as (`str`, *optional*): what these are: `"4 bits, int8"`.
    """

    model: str
    dtype: str
    device: str
    threads: int
    timings: list[Timing]
    dense_bytes: int
    packed_bytes: int
    resident: dict[str, int]
    coded_bytes: int | None = None
    coded_as: str | None = None

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
        rows = [
            [t.work, f"{t.dense:.1f}", f"{t.packed:.1f}", f"{t.ratio:.2f}", f"{t.lowest:.2f} to {t.highest:.2f}"]
            for t in self.timings
        ]
        header = ["tokens per second", "dense", "packed", "times", "lowest and highest"]
        if self.coded_as:
            header += [self.coded_as, "times"]
            rows = [[*row, f"{t.coded:.1f}", f"{t.coded_ratio:.2f}"] for row, t in zip(rows, self.timings)]
        model = {"dense": self.dense_bytes, "packed": self.packed_bytes}
        model |= {"coded": self.coded_bytes} if self.coded_as else {}
        sizes = [_sizes("model", model), *([_sizes("resident", self.resident)] if self.resident else [])]
        memory = format_table(
            ["memory", "dense", "packed", "times", *([self.coded_as, "times"] if self.coded_as else [])], sizes
        )
        about = f"{self.model}, {self.dtype} on {self.device}, {self.threads} thread{'s' * (self.threads > 1)}"
        return f"{about}\n\n{format_table(header, rows)}\n\n{memory}\n\n{self.verdict}"


def _sizes(name: str, bytes_of: dict[str, int]) -> list[str]:
    """A row of the table of memory."""
    dense, row = bytes_of["dense"], [name, format_bytes(bytes_of["dense"])]
    for form in ("packed", "coded"):
        if form in bytes_of:
            row += [format_bytes(bytes_of[form]), f"{bytes_of[form] / max(1, dense):.2f}"]
    return row


def measure_speed(
    dense: PreTrainedModel,
    packed: PreTrainedModel,
    batches: Sequence[int] = (1, 4, 8),
    prompt_tokens: int = 512,
    new_tokens: int = 32,
    rounds: int = 5,
    resident: dict[str, int] | None = None,
    coded: PreTrainedModel | None = None,
) -> SpeedReport:
    """Times the forms of one model in turns, so that a machine's moods meet all.

    Args:
        dense, packed (`PreTrainedModel`): a sparse model with dense weights, and the same with packed ones.
        batches (`Sequence[int]`): sequences that are generated at a time.
        prompt_tokens (`int`): length of the prefill that is timed.
        new_tokens (`int`): tokens to generate for each sequence.
        rounds (`int`): how often each kind of work is done by both; one more goes before, to warm up.
        resident (`dict[str, int]`, *optional*): what the process grew by with each, for the report.
        coded (`PreTrainedModel`, *optional*): the same model with values of few bits, see [`sparsify`].

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
    models = [dense, packed, *([coded] if coded is not None else [])]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(inference(model))
        timings = [_in_turns(name, tokens, seconds, models, rounds) for name, tokens, seconds in work]
    return SpeedReport(
        model=public_name(dense),
        dtype=str(dense.dtype).removeprefix("torch."),
        device=str(dense.device),
        threads=torch.get_num_threads(),
        timings=timings,
        dense_bytes=dense.get_memory_footprint(),
        packed_bytes=packed.get_memory_footprint(),
        resident=dict(resident or {}),
        coded_bytes=coded.get_memory_footprint() if coded is not None else None,
        coded_as=_coded_as(coded) if coded is not None else None,
    )


def _coded_as(model: PreTrainedModel) -> str:
    """What a model's values and inputs are, by the first of its packed modules. Raises `ValueError` if it has none."""
    for _, module in packed_modules(model):
        if isinstance(getattr(module, "rows", None), CodedRows):
            return f"{module.rows.value_bits} bits, {module.rows.activations}"
    raise ValueError("measure_speed(coded=...) has no values of few bits: make it with sparsify(model, value_bits=4).")


class _Moments(StoppingCriteria):
    """Takes down when each token was finished, and stops nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seen: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores, **_) -> torch.Tensor:
        _wait_for(self.device)
        self.seen.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def decode_seconds(model: PreTrainedModel, batch: int, new_tokens: int) -> float:
    """Seconds that a batch of sequences takes to become so many tokens longer, its prefill not counted."""
    ids, moments = _tokens(model, batch, PROMPT), _Moments(model.device)
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
    models: Sequence[PreTrainedModel],
    rounds: int,
) -> Timing:
    found: list[list[float]] = []
    for _ in logging.tqdm(range(rounds + 1), desc=work, unit="round", leave=False):
        found.append([seconds(model) for model in models])
    dense, packed, *coded = zip(*found[1:])
    ratios = [one / other for one, other in zip(dense, packed)]
    return Timing(
        work,
        tokens / statistics.median(dense),
        tokens / statistics.median(packed),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        *(tokens / statistics.median(times) for times in coded),
        *(statistics.median(one / other for one, other in zip(dense, times)) for times in coded),
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
