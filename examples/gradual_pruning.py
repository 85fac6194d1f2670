"""Prune a dense model step by step while it is fine-tuned, with the training data as calibration.

python examples/gradual_pruning.py --model Qwen/Qwen3-0.6B --train train.txt --evaluate wikitext2 --output qwen3-70
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from optimum_neuronal import NeuronALCallback, NeuronALConfig, evaluate_perplexity
from optimum_neuronal.evaluation.perplexity import load_windows


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory of a dense model")
parser.add_argument("--train", type=Path, required=True, help="file with training text")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--output", type=Path, required=True, help="directory for the sparse model")
parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
parser.add_argument("--topup", default="search", help="where sparsity goes; uniform is quickest (default: search)")
parser.add_argument("--num-samples", type=int, default=128, help="calibration sequences (default: 128)")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)  # AdamW's small steps need the precision
tokenizer = AutoTokenizer.from_pretrained(args.model)
print(f"dense: perplexity {evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")

windows = load_windows(model.config, tokenizer, args.train, args.length).ids  # of Gemma models, each begins with BOS
arguments = TrainingArguments(
    args.output,
    use_cache=True,  # Trainer would set it to false in config.json
    max_steps=args.steps,
    per_device_train_batch_size=8,
    learning_rate=5e-4,
    lr_scheduler_type="cosine",
    warmup_steps=args.steps // 20,
    save_strategy="no",
    report_to="none",
)
data = [{"input_ids": window, "labels": window} for window in windows]
schedule = {0: 0.5, args.steps // 5: 0.6, args.steps * 2 // 5: 0.7}  # after which step -> sparsity
config = NeuronALConfig(0.7, saliency="wanda", topup=args.topup, num_samples=args.num_samples)
callback = NeuronALCallback(config, schedule=schedule)
Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()

print(f"{callback.keeper.sparsity:.1%} sparse: perplexity", end=" ")
print(f"{evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")
model.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
