"""Compare where sparsity can go on one model: tables on the terminal and in a directory.

python examples/compare.py --model Qwen/Qwen3-0.6B --dataset c4 --evaluate wikitext2 --output comparison
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuronal import compare


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory")
parser.add_argument("--output", required=True, help="directory for tables; a second run continues there")
parser.add_argument("--sparsity", type=float, nargs="+", default=[0.6, 0.7], help="shares of zeros (default: 0.6 0.7)")
parser.add_argument("--dataset", default="c4", help="calibration text (default: c4)")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--num-samples", type=int, default=128, help="calibration sequences (default: 128)")
args = parser.parse_args()

comparison = compare(
    AutoModelForCausalLM.from_pretrained(args.model, dtype="auto"),
    AutoTokenizer.from_pretrained(args.model),
    saliencies=["wanda"],
    topups=["uniform", "owl", "neuronal", "search:budget=30"],  # NAME, or NAME:KEY=VALUE,KEY=VALUE
    sparsities=args.sparsity,
    dataset=args.dataset,
    evaluate=[args.evaluate],
    output=args.output,
    num_samples=args.num_samples,
)
print(comparison)
best = min(comparison.aggregates(), key=lambda entry: (-entry.sparsity, entry.perplexity_factor))
print(f"\nAt {best.sparsity:.0%} {best.topup} loses least: {best.perplexity_factor:.2f} times the dense perplexity.")
