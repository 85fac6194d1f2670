"""Speed and memory of a sparse model with dense and with packed weights."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..common.display import format_bytes, format_table
from ..common.notes import progress
from ..common.torch_state import inference, time_on
from ..common.validation import check_count
from ..data.token_windows import resolve_seq_length
from ..model.origin import public_name
from .perplexity import check_language_model


PROMPT = 16  # tokens before the generated ones


@dataclass(frozen=True)
class Timing:
    """Speed of one kind of work."""

    work: str  # "decode, batch 4" or "prefill, 512 tokens"
    dense: float  # median tokens per second of the whole batch
    packed: float
    lowest: float  # extremes over the rounds of packed to dense speed
    highest: float

    @property
    def ratio(self) -> float:
        """Packed to dense speed, of the medians."""
        return self.packed / self.dense

    @property
    def verdict(self) -> str:
        """What all rounds agree on."""
        return "faster" if self.lowest > 1 else "slower" if self.highest < 1 else "no clear difference"


@dataclass(frozen=True, repr=False)
class SpeedReport:
    """Outcome of [`measure_speed`]. `print(report)` shows it as a table. Bytes are of parameters and buffers."""

    model: str
    dtype: str
    device: str
    threads: int
    timings: list[Timing]
    dense_bytes: int
    packed_bytes: int

    def __repr__(self) -> str:
        rows = []
        for one in self.timings:
            speeds = [f"{value:.1f}" for value in (one.dense, one.packed)] + [f"{one.ratio:.2f}"]
            rows.append([one.work, *speeds, f"{one.lowest:.2f} to {one.highest:.2f}", one.verdict])
        sizes = self.dense_bytes, self.packed_bytes
        memory = ["weights and buffers", *map(format_bytes, sizes), f"{sizes[1] / max(1, sizes[0]):.2f}"]
        title = f"{self.model}, {self.dtype} on {self.device}, {self.threads} thread{'s' * (self.threads > 1)}"
        forms = ["dense", "packed", "packed / dense"]
        table = format_table(["tokens per second", *forms, "lowest and highest", "packed is"], rows)
        return f"{title}\n\n{table}\n\n{format_table(['memory', *forms], [memory])}"


def measure_speed(
    dense: PreTrainedModel,
    packed: PreTrainedModel,
    batches: Sequence[int] = (1, 4, 8),
    prompt_tokens: int = 512,
    new_tokens: int = 32,
    rounds: int = 5,
) -> SpeedReport:
    """Time two forms of one sparse model alternately, so that other load on the machine slows down both.

    Args:
        dense, packed (`PreTrainedModel`): with dense weights, and with packed ones.
        batches (`Sequence[int]`): numbers of sequences to generate at a time.
        prompt_tokens, new_tokens (`int`): length of the prefill, and tokens to generate for each sequence.
        rounds (`int`): timings of each kind of work. One more comes first, to warm up.
    """
    for value in (*batches, prompt_tokens, new_tokens, rounds):
        check_count("batches, prompt_tokens, new_tokens or rounds", value, 1)
    check_language_model(dense)
    resolve_seq_length(dense.config, max(2, prompt_tokens, PROMPT + 1 + new_tokens))
    with inference(dense), inference(packed):
        work = [
            (f"decode, batch {batch}", batch * new_tokens, decode_seconds, (batch, new_tokens)) for batch in batches
        ]
        work.append((f"prefill, {prompt_tokens} tokens", prompt_tokens, prefill_seconds, (prompt_tokens,)))
        timings = []
        for name, tokens, seconds, sizes in work:
            turns = progress(range(rounds + 1), f"timing {name}", "round")
            times = [[seconds(model, *sizes) for model in (dense, packed)] for _ in turns]
            timings.append(_summarize(name, tokens, times[1:]))
    return SpeedReport(
        model=public_name(dense),
        dtype=str(dense.dtype).removeprefix("torch."),
        device=str(dense.device),
        threads=torch.get_num_threads(),
        timings=timings,
        dense_bytes=dense.get_memory_footprint(),
        packed_bytes=packed.get_memory_footprint(),
    )


def _summarize(work: str, tokens: int, times: list[list[float]]) -> Timing:
    """Return the speed of work on this many tokens, from the seconds [dense, packed] of each round."""
    dense, packed = (tokens / statistics.median(seconds) for seconds in zip(*times))
    ratios = [slow / fast for slow, fast in times]
    return Timing(work, dense, packed, min(ratios), max(ratios))


class _TokenTimes(BaseStreamer):
    """Records when the prompt and each token are available on the CPU."""

    def __init__(self):
        self.seen: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        pass


def decode_seconds(model: PreTrainedModel, batch: int, new_tokens: int) -> float:
    """Return the seconds in which a batch of sequences grows by `new_tokens` each, without the prefill."""
    ids, times, count = _random_tokens(model, batch, PROMPT), _TokenTimes(), 1 + new_tokens
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    options |= {"num_beams": 1, "num_return_sequences": 1}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=times, **options)
    return times.seen[-1] - times.seen[1]


def prefill_seconds(model: PreTrainedModel, tokens: int) -> float:
    """Return the seconds of one forward of one sequence."""
    ids = _random_tokens(model, 1, tokens)
    start = time_on(model.device)
    model(input_ids=ids)
    return time_on(model.device) - start


def _random_tokens(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(model.device)
