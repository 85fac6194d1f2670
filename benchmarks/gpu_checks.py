"""What `benchmarks/gpu.py` checks before it measures: small models, pruned and packed on the device and on the CPU."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.shared import random_llama, zero_randomly
from optimum_neuronal import NeuronALConfig, NeuronALPruner, densify, sparsify


WANDA, NEURONAL, AUTHORS = "Wanda", "Wanda, NeuronAL (sequence)", "Wanda, NeuronAL (authors)"
SPARSEGPT, REFIT, ALPS, SEARCH = "SparseGPT", "SparseGPT, refit (1 epoch)", "ALPS", "Wanda, search"
TIMED = {  # the fastest first
    WANDA: {"saliency": "wanda", "topup": "uniform"},
    NEURONAL: {"saliency": "wanda", "topup": "neuronal"},
    SPARSEGPT: {"saliency": "sparsegpt", "topup": "uniform"},
    ALPS: {"saliency": "alps", "topup": "uniform"},
    AUTHORS: {"saliency": "wanda", "topup": "neuronal", "topup_args": {"variant": "authors"}},
    REFIT: {"saliency": "sparsegpt", "topup": "uniform", "refit_epochs": 1},
    SEARCH: {"saliency": "wanda", "topup": "search"},
}
METHODS = TIMED | {
    "magnitude": {"saliency": "magnitude", "topup": "uniform"},
    "RIA": {"saliency": "ria", "topup": "uniform"},
    "MULTIFLOW": {"saliency": "multiflow", "topup": "uniform"},
    "DSnoT": {"saliency": "wanda", "topup": "dsnot"},
}
# Largest share of elements in which masks may differ from the CPU's, which rounds sums differently. With ALPS, a relative
# change of weights by 1e-7 moves up to 5% of them, and with a search 3%.
ALLOWED = {**dict.fromkeys(METHODS, 1e-3), SPARSEGPT: 1e-2, REFIT: 1e-2, ALPS: 0.1, SEARCH: 0.1}
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of logits, as a share of the largest


def random_ids(sequences: int, tokens: int, vocabulary: int = 1000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (sequences, tokens), generator=torch.Generator().manual_seed(0))


def config_of(method: str, ids: torch.Tensor) -> NeuronALConfig:
    return NeuronALConfig(0.6, dataset=None, num_samples=len(ids), **METHODS[method])


def prune(method: str, model: LlamaForCausalLM, ids: torch.Tensor, **how) -> NeuronALPruner:
    """Prune a model in place, and return the pruner."""
    pruner = NeuronALPruner(config_of(method, ids))
    pruner.prune(model, ids, **how)
    return pruner


def zeros_of(model: LlamaForCausalLM) -> torch.Tensor:
    """Return where the projections' weights are zero, in one dimension, on the CPU."""
    return torch.cat([w.flatten().cpu() == 0 for name, w in model.named_parameters() if name.endswith("_proj.weight")])


def difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the share of different elements of masks, or the largest difference as a share of the largest number."""
    if values.dtype == torch.bool:
        return float((values != expected).double().mean())
    values, expected = values.double().cpu(), expected.double().cpu()
    return float((values - expected).abs().max() / expected.abs().max())


def find_checks(device: torch.device, folder: Path) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Yield what is checked, the largest difference allowed, and a function that finds it. Prunes are in float32."""
    torch.manual_seed(0)
    random_llama(64, 3, 64).save_pretrained(folder / "dense")
    load = partial(AutoModelForCausalLM.from_pretrained, folder / "dense", dtype=torch.float32)
    ids = random_ids(16, 32)

    def masks(method: str, on: str | torch.device = device, **how) -> torch.Tensor:
        prune(method, model := load().to(on), ids, **how)
        return zeros_of(model)

    def offloaded() -> torch.Tensor:
        model = cpu_offload(load(), execution_device=device)
        prune(NEURONAL, model, ids).save(model, folder / "offloaded")
        return zeros_of(AutoModelForCausalLM.from_pretrained(folder / "offloaded"))

    def streamed() -> torch.Tensor:
        how = {"stream_to": folder / "rewritten", "device": device, "dtype": torch.float32}
        pruner = NeuronALPruner.from_pretrained(folder / "dense", config=config_of(NEURONAL, ids), **how)
        pruner.quantize(folder / "streamed", dataset=ids)
        return zeros_of(AutoModelForCausalLM.from_pretrained(folder / "streamed"))

    def resumed() -> torch.Tensor:
        model, work = load().to(device), folder / "work"

        def stop(*_) -> None:
            if any(work.glob("block-*")):
                raise InterruptedError

        hook = model.model.layers[-1].register_forward_pre_hook(stop)
        with suppress(InterruptedError):
            prune(NEURONAL, model, ids, work_dir=work)
        hook.remove()
        if not prune(NEURONAL, model, ids, work_dir=work).report.resumed:
            raise RuntimeError("the first prune was not interrupted")
        return zeros_of(model)

    def sparse(dtype: torch.dtype) -> LlamaForCausalLM:
        zero_randomly(model := load(), 0.6)
        return model.to(device, dtype)

    @torch.inference_mode()
    def logits(dtype: torch.dtype, tokens: int) -> float:
        dense, sequence = sparse(dtype), ids[:1, :tokens].to(device)
        return difference(sparsify(copy.deepcopy(dense))(sequence).logits, dense(sequence).logits)

    def unpacked(dtype: torch.dtype) -> float:
        dense = sparse(dtype)
        again = densify(sparsify(copy.deepcopy(dense))).state_dict()
        return max(difference(again[name], weight) for name, weight in dense.state_dict().items())

    for name, allowed in ALLOWED.items():
        yield f"masks of {name}, against the CPU", allowed, lambda n=name: difference(masks(n), masks(n, "cpu"))
    others = {
        "with hidden states in CPU memory": partial(masks, NEURONAL, max_hidden_bytes=0),
        "with weights in CPU memory": offloaded,
        "with weights on disk": streamed,
        "of a prune that resumes": resumed,
    }
    for name, find in others.items():
        yield f"masks {name}", 0.0, lambda find=find: difference(find(), masks(NEURONAL))
    for dtype, allowed in ROUNDING.items():
        for tokens in (1, 4, 32):
            yield f"logits of packed weights, {tokens} tokens, {dtype}", allowed, partial(logits, dtype, tokens)
        yield f"weights packed and unpacked, {dtype}", 0.0, partial(unpacked, dtype)
