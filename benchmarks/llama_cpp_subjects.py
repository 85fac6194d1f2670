"""Measures one model: a packed model of this package or a GGUF file in llama.cpp, by the clock or by processor time."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.same_shapes import projection_seconds
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.evaluation.llama_cpp import measure_gguf
from optimum_neuronal.evaluation.speed import decode_seconds, prefill_seconds


SINGLE, PROJECTIONS = "decode, batch 1", "projections"

Rates = dict[str, float]  # kind of work -> tokens per second
Subject = Callable[[int], Rates]  # measures one model with a number of threads


@dataclass(frozen=True)
class Work:
    """What is measured of every model.

    Args:
        batches: numbers of sequences.
        prompt_tokens: of the prefill.
        new_tokens: of each sequence.
        programs: folder of llama.cpp's programs.
        builds: of llama.cpp, noted when they are met.
    """

    batches: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    programs: Path
    builds: set[str]

    @property
    def names(self) -> list[str]:
        """Kinds of work, as `speed` calls them."""
        return [*(f"decode, batch {batch}" for batch in self.batches), f"prefill, {self.prompt_tokens} tokens"]


def packed_subject(model: LlamaForCausalLM, work: Work) -> Subject:
    """What measures a model of this package by the clock."""
    prompt, new = work.prompt_tokens, work.new_tokens

    def measure(threads: int) -> Rates:
        torch.set_num_threads(threads)
        with inference(model):
            seconds = [decode_seconds(model, batch, new) for batch in work.batches]
            tokens = [batch * new for batch in work.batches]
            rates = [
                count / each for count, each in zip([*tokens, prompt], [*seconds, prefill_seconds(model, prompt)])
            ]
        return dict(zip(work.names, rates)) | {PROJECTIONS: 1 / projection_seconds(model)}

    return _warmed(model, measure)


def packed_cpu_subject(model: LlamaForCausalLM, work: Work) -> Subject:
    """What measures one sequence on one thread by processor time."""

    def measure(threads: int) -> Rates:
        torch.set_num_threads(threads)
        with inference(model):
            seconds = decode_seconds(model, 1, work.new_tokens, time.process_time) / work.new_tokens
        return {SINGLE: 1 / seconds, PROJECTIONS: 1 / projection_seconds(model, clock=time.process_time)}

    return _warmed(model, measure)


def gguf_subject(file: Path, work: Work) -> Subject:
    """What measures a GGUF file by the clock, and notes llama.cpp's build."""

    def measure(threads: int) -> Rates:
        numbers = (work.batches, work.prompt_tokens, work.new_tokens)
        speed = measure_gguf(file, threads, *numbers, rounds=1, folder=work.programs)
        work.builds.add(speed.build)
        return speed.rates

    return measure


def gguf_cpu_subject(file: Path, work: Work) -> Subject:
    """What measures one sequence on one thread by processor time, and notes llama.cpp's build."""

    def spent(tokens: int, threads: int) -> float:
        """Processor time of a whole run, which loads, warms up, reads a token and generates some."""
        before = os.times()
        speed = measure_gguf(file, threads, (1,), 1, tokens, rounds=1, folder=work.programs)
        after = os.times()
        work.builds.add(speed.build)
        return after.children_user + after.children_system - before.children_user - before.children_system

    def measure(threads: int) -> Rates:
        return {SINGLE: work.new_tokens / (spent(1 + work.new_tokens, threads) - spent(1, threads))}

    return measure


def _warmed(model: LlamaForCausalLM, measure: Subject) -> Subject:
    with inference(model):
        decode_seconds(model, 1, 1)
    return measure
