"""Fine-tune a sparse model toward the predictions of its dense model: every weight that was pruned stays zero.

python examples/distill.py --model qwen3-70 --teacher Qwen/Qwen3-0.6B --train c4 --evaluate wikitext2 --output tuned
"""

import argparse

from optimum_neuronal import FinetuneConfig, finetune
from optimum_neuronal.evaluation.answers import Answers


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory of a sparse model")
parser.add_argument("--teacher", required=True, help="Hub id or directory of the dense model")
parser.add_argument("--train", default="c4", help="training text: a name, Hub id or file (default: c4)")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--prompts", nargs="+", help="to answer before and after (default: 48 questions)")
parser.add_argument("--output", required=True, help="directory for the tuned model")
parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
args = parser.parse_args()

config = FinetuneConfig(dataset=args.train, steps=args.steps, seq_length=args.length)
options = {"teacher": args.teacher, "evaluate": [args.evaluate], "answers": args.prompts or True}
model, report = finetune(args.model, args.output, config, **options)
print(f"{report}\n\n{Answers(**report.training[-1]['answers']['after'])}")
