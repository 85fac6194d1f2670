"""A training run that goes on where it was stopped, bit by bit, for benchmarks/ladder.py."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file


MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for every parameter


@dataclass(frozen=True)
class Plan:
    """How the model is trained."""

    rungs: tuple[int, ...] = (1, 3, 10, 16, 30, 100, 300)  # training tokens per parameter
    length: int = 256  # tokens of a sequence
    batch: int = 16  # sequences of a step
    micro: int = 4  # sequences computed at a time
    rate: float = 2e-3
    warmup: int = 500  # steps
    minutes: float = 10  # of training between two writes of the state
    told: int = 50  # steps between two lines of the log


def multiplies_bf16() -> bool:
    """Return True if the processor has instructions that multiply bfloat16."""
    information = Path("/proc/cpuinfo")
    return information.exists() and "avx512_bf16" in information.read_text()


class Training:
    """A model, its optimizer and the number of steps it has made.

    Weights and moments are float32. Products are bfloat16 where the processor multiplies it. Eager attention is faster
    than torch's fused one for heads of 32 dimensions.
    """

    def __init__(self, state: Path, plan: Plan):
        load, kind = transformers.AutoModelForCausalLM.from_pretrained, {"dtype": torch.float32}
        self.plan, self.model = plan, load(state / "model", attn_implementation="eager", **kind)
        self.step = self.began = getattr(self.model.config, "training_steps", 0)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bf16())
        self.parameters = dict(self.model.named_parameters())  # each once, though two places share the embedding
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, plan.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        tokens = torch.from_numpy(np.fromfile(state / "tokens.bin", dtype="<u2").astype(np.int16))  # below 2**15
        self.windows = tokens[: len(tokens) // plan.length * plan.length].view(-1, plan.length)
        self.epoch, self.order = -1, torch.empty(0)

    def last_step(self, rung: int) -> int:
        """Return the number of steps after which every parameter has seen ``rung`` tokens."""
        size = sum(parameter.numel() for parameter in self.parameters.values())
        return math.ceil(rung * size / (self.plan.batch * self.plan.length))

    def leaves(self, rung: int) -> int:
        """Return the step of the main run at which the branch of a rung leaves it."""
        last = self.last_step(rung)
        return last - last // 10

    def load(self, path: Path) -> None:
        """Take weights, moments and step from a file."""
        with safe_open(path, "pt") as file:
            self.step, self.began = (int(file.metadata()[key]) for key in ("step", "began"))
            held = set(file.keys())
            for name, parameter in self.parameters.items():
                parameter.data.copy_(file.get_tensor(f"weight.{name}"))
                keys = [
                    key for key in MOMENTS if f"{key}.{name}" in held
                ]  # none in a run that was stopped at its start
                self.optimizer.state[parameter] = {key: file.get_tensor(f"{key}.{name}") for key in keys}

    def save(self, path: Path) -> None:
        """Write weights, moments and step: a reader finds the old file or the new one, whole."""
        tensors = {f"weight.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors |= {f"{key}.{name}": value for key, value in self.optimizer.state[parameter].items()}
        new = path.with_suffix(".new")
        save_file(tensors, new, {"step": str(self.step), "began": str(self.began)})
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)

    def batch(self) -> torch.Tensor:
        """Return the token ids of this step, (batch, length): every window once, in a random order, then again."""
        per_epoch = len(self.windows) // self.plan.batch
        epoch, position = divmod(self.step, per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(epoch)
            self.epoch, self.order = epoch, torch.randperm(len(self.windows), generator=generator)
        chosen = self.order[position * self.plan.batch :][: self.plan.batch]
        return self.windows[chosen].long()

    def learn(self, rate: float) -> float:
        """Make one step, and return the mean loss of the batch.

        Logits are computed for a few hundred tokens at a time, which stay in the processor's cache.
        """
        ids, total = self.batch(), 0.0
        predictions = len(ids) * (self.plan.length - 1)
        for rows in ids.split(self.plan.micro):
            with self.autocast:
                hidden = self.model.model(rows, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
            cut = hidden.detach().requires_grad_()
            for states, targets in zip(cut.split(512), rows[:, 1:].flatten().split(512)):
                with self.autocast:
                    logits = self.model.lm_head(states).float()
                loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / predictions
                loss.backward()
                total += loss.item()
            hidden.backward(cut.grad)
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total

    def advance(self, path: Path, rung: int, stop: Callable[[], bool], decay: bool = False) -> bool:
        """Train the main run up to where the rung branches off, or the branch to its end, and write it to ``path``.

        Return False if stopped before.
        """
        last, leaves = self.last_step(rung), self.leaves(rung)
        end, name = (last, f"rung {rung}") if decay else (leaves, f"towards rung {rung}")
        written = told = time.monotonic()
        losses: list[float] = []
        while self.step < end and not stop():
            rate = self.plan.rate * min(1, (self.step - self.began + 1) / self.plan.warmup)
            losses.append(self.learn(rate * (last - self.step) / (last - leaves) if decay else rate))
            now = time.monotonic()
            if len(losses) == self.plan.told:
                seconds, loss = (now - told) / len(losses), sum(losses) / len(losses)
                speed, left = self.plan.batch * self.plan.length / seconds, (last - self.step) * seconds / 3600
                line = f"step {self.step:,} of {last:,}, loss {loss:.4f}, {speed:,.0f} tokens/s, {left:.1f} h left"
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {name}: {line}", flush=True)
                told, losses = now, []
            if now - written > 60 * self.plan.minutes:
                self.save(path)
                written = now
        if self.step:
            self.save(path)
        return self.step == end
