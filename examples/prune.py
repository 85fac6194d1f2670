"""Prune a model with the paper's NeuronAL, print the chosen lambdas, and reload it with plain transformers.

python examples/prune.py --model Qwen/Qwen3-0.6B --dataset c4 --evaluate wikitext2 --output qwen3-70
"""

import argparse

from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.common.torch_state import default_device


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory")
parser.add_argument("--output", required=True, help="directory for the sparse model")
parser.add_argument("--preset", default="paper", help="paper, fast or best (default: paper)")
parser.add_argument("--sparsity", type=float, default=0.7, help="share of weights to set to zero (default: 0.7)")
parser.add_argument("--dataset", default="c4", help="calibration text (default: c4)")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--num-samples", type=int, default=128, help="calibration sequences (default: 128)")
args = parser.parse_args()

data = {"dataset": args.dataset, "num_samples": args.num_samples}
config = NeuronALConfig.preset(args.preset, sparsity=args.sparsity, **data)
pruner = NeuronALPruner.from_pretrained(args.model, config=config, dtype="auto")
pruner.model.to(default_device())
pruner.quantize(args.output, evaluate={"test": args.evaluate})  # optimum's name for it: prune and save
print(pruner.report)
print(f"dense: perplexity {pruner.report.evaluation['test']['dense']:.2f}")
if args.preset == "paper":
    print(f"NeuronAL chose lambda {pruner.report.block_lambda} for blocks and {pruner.report.row_lambda} for rows")

reloaded = AutoModelForCausalLM.from_pretrained(args.output, dtype="auto").to(default_device())
print(f"sparse, reloaded: perplexity {evaluate_perplexity(reloaded, pruner.tokenizer, args.evaluate):.2f}")
