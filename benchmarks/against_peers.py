"""Compare prunes with those of other packages, on the same weights and device, alternately.

    pip install llmcompressor .
    python -m benchmarks.against_peers MODEL [--methods wanda sparsegpt] [--num-samples 32] [--seq-length 512]

MODEL is a folder or an id on the Hub. Wanda and SparseGPT run with uniform sparsity in llm-compressor.

`--methods neuronal` runs NeuronAL over Wanda in its authors' code (https://github.com/eliacunegatti/NeuroAL), with both steps or
`--steps block`. It draws its own 8 alignment sequences of C4, and its seconds include this. With `--sampling authors`, they are
our first 8.

    pip install weightwatcher; git clone https://github.com/eliacunegatti/NeuroAL; (cd NeuroAL/ops; python setup.py install)
    PYTHONPATH=NeuroAL:. python -m benchmarks.against_peers MODEL --methods neuronal --sparsity 0.6 --seq-length 2048 --sampling authors

The operator of their row step needs a CUDA device. On a CPU, write this into NeuroAL/ops/mask_gen/functions/mask_gen.py:

    import torch

    def mask_gen(order, shape, kept):
        return torch.ones(shape).scatter(1, order, (torch.arange(shape[1]) >= kept[: shape[0], None]).float())

`--methods alps` runs ALPS with uniform sparsity in its authors' code (https://github.com/mazumder-lab/ALPS). Its blocks are
driven from here, since its own loop calls them without rotary embeddings. It names a CUDA device; the sed lets a CPU do:

    git clone https://github.com/mazumder-lab/ALPS; sed -i 's/cuda:0/cpu/; s/torch.cuda.synchronize()/pass/' ALPS/alps.py
    PYTHONPATH=ALPS:. python -m benchmarks.against_peers MODEL --methods alps --sparsity 0.6

All run with their own defaults. Seconds are those of the whole prune, without loading the model and drawing the sequences.
Perplexity is that of the head of WikiText-2's test text.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.blocks.block_inputs import Stream
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.common.torch_state import default_device, inference, time_on
from optimum_neuronal.data.calibration import draw_windows
from optimum_neuronal.model.find_blocks import find_decoder


HEADER = ("method", "seconds", "peer", "ratio", "perplexity", "peer", "zeros elsewhere")
Prune = Callable[[PreTrainedModel, PreTrainedTokenizerBase, torch.Tensor, argparse.Namespace], None]


def prune_here(model, ids: torch.Tensor, **fields) -> None:
    NeuronALPruner(NeuronALConfig(num_samples=len(ids), seq_length=ids.shape[1], **fields)).prune(model, ids)


def uniform(model, tokenizer, ids, args, saliency: str) -> None:
    prune_here(model, ids, sparsity=args.sparsity, saliency=saliency, topup="uniform")


def neuronal(model, tokenizer, ids, args) -> None:
    topup = {"variant": "authors", "steps": args.steps}
    prune_here(model, ids, sparsity=args.sparsity, saliency="wanda", topup="neuronal", topup_args=topup)


def in_llm_compressor(model: PreTrainedModel, ids: torch.Tensor, modifier) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot

    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    sizes = {"num_calibration_samples": len(ids), "max_seq_length": ids.shape[1]}
    options = {"shuffle_calibration_samples": False, "pipeline": "sequential"}
    oneshot(model, dataset=data, recipe=modifier, **sizes, **options)


def their_uniform(model, tokenizer, ids, args, modifier: str) -> None:
    from llmcompressor.modifiers import pruning

    in_llm_compressor(model, ids, getattr(pruning, modifier)(sparsity=args.sparsity, ignore=["re:.*lm_head"]))


def their_neuronal(model, tokenizer, ids, args) -> None:
    from lib.prune import prune_wanda
    from sparsity_distribution import get_neuroal_sparsity_distribution

    # Their code calls decoder layers as transformers did before it passed rotary embeddings to them.
    def add_embeddings(layer, inputs, kwargs):
        return inputs, kwargs | {"position_embeddings": model.model.rotary_emb(inputs[0], kwargs["position_ids"])}

    layers, device = model.model.layers, model.device
    hooks = [layer.register_forward_pre_hook(add_embeddings, with_kwargs=True) for layer in layers]
    try:
        model.seqlen = ids.shape[1]
        options = argparse.Namespace(
            seed=0, sparsity_ratio=args.sparsity, prune_method="wanda", neuroal_step=args.steps, model_type="llama"
        )
        sparsities, granularity, *_ = get_neuroal_sparsity_distribution(options, model, tokenizer, device, layers)
        options.nsamples = len(ids)
        sequences = [(row[None], None) for row in ids]
        prune_wanda(options, model, tokenizer, device, sequences, dist=sparsities, granularity=granularity)
    finally:
        for hook in hooks:
            hook.remove()


def their_alps(model, tokenizer, ids, args) -> None:
    from alps import ALPS_prune

    runner = BlockRunner(find_decoder(model), device=model.device)
    with inference(model):
        inputs = runner.capture(ids)
        stream = Stream(inputs.hidden)
        for block, calls in zip(runner.decoder.blocks, inputs.calls):
            linears = [module for module in block.module.modules() if isinstance(module, torch.nn.Linear)]
            solvers = {module: ALPS_prune(module, *ids.shape) for module in linears}

            def add(module, received, output, solvers=solvers):
                solvers[module].add_batch(received[0], output)

            hooks = [module.register_forward_hook(add) for module in linears]
            runner.output(block, stream, calls)
            for hook in hooks:
                hook.remove()
            for solver in solvers.values():
                solver.ALPS_admm(sp=args.sparsity)
            stream = runner.output(block, stream, calls)


METHODS: dict[str, tuple[Prune, Prune]] = {
    "wanda": (partial(uniform, saliency="wanda"), partial(their_uniform, modifier="WandaPruningModifier")),
    "sparsegpt": (partial(uniform, saliency="sparsegpt"), partial(their_uniform, modifier="SparseGPTModifier")),
    "alps": (partial(uniform, saliency="alps"), their_alps),
    "neuronal": (neuronal, their_neuronal),
}


def zeros_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: weight == 0 for name, weight in model.named_parameters() if name.endswith("_proj.weight")}


def share_elsewhere(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the share of elements that are zero in one of two models only."""
    return sum(int((ours[name] ^ theirs[name]).sum()) for name in ours) / sum(mask.numel() for mask in ours.values())


def compare(method: str, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> list[str]:
    """Return a row of the table."""
    seconds, perplexities, zeros = [], [], []
    for prune in METHODS[method]:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(default_device())
        with torch.no_grad():
            model(ids[:1].to(model.device))  # loads the device's kernels before the clock starts
        start = time_on(model.device)
        prune(model, tokenizer, ids, args)
        seconds.append(time_on(model.device) - start)
        zeros.append(zeros_of(model))
        test = (args.evaluate, args.window)
        perplexities.append(evaluate_perplexity(model, tokenizer, *test, max_windows=args.windows))
    times = [f"{value:.1f}" for value in seconds] + [f"{seconds[1] / seconds[0]:.1f}"]
    return [method, *times, *(f"{value:.2f}" for value in perplexities), f"{share_elsewhere(*zeros):.2%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["wanda", "sparsegpt"])
    parser.add_argument("--sparsity", type=float, default=0.5, help="(default: 0.5)")
    parser.add_argument("--dtype", default="float32", help="of the weights (default: float32)")
    parser.add_argument("--dataset", default="c4", help="to calibrate with (default: c4)")
    parser.add_argument("--sampling", default="distinct", help="of the calibration sequences (default: distinct)")
    parser.add_argument("--steps", choices=("both", "block"), default="both", help="of NeuronAL (default: both)")
    parser.add_argument("--num-samples", type=int, default=32, help="calibration sequences (default: 32)")
    parser.add_argument("--seq-length", type=int, default=512, help="their tokens (default: 512)")
    parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a test window (default: 1024)")
    parser.add_argument("--windows", type=int, default=8, help="test windows (default: 8)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sizes = {"num_samples": args.num_samples, "seq_length": args.seq_length, "seed": 0, "vocab_size": len(tokenizer)}
    ids = draw_windows(args.dataset, tokenizer, **sizes, sampling=args.sampling).ids
    print(format_markdown(HEADER, [compare(method, args, tokenizer, ids) for method in args.methods]))


if __name__ == "__main__":
    main()
