"""Fine-tune a sparse model with transformers' Trainer: every weight that was pruned stays zero.

python examples/finetune.py --model qwen3-70 --train train.txt --evaluate wikitext2 --output qwen3-70-tuned
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments

from optimum_neuronal import SparsityCallback, evaluate_perplexity
from optimum_neuronal.evaluation.perplexity import load_windows
from optimum_neuronal.model.load_model import load_model


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory of a sparse model")
parser.add_argument("--train", type=Path, required=True, help="file with training text")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--output", type=Path, required=True, help="directory for the tuned model")
parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
args = parser.parse_args()

model = load_model(args.model, dtype=torch.float32)  # AdamW's small steps need the precision
tokenizer = AutoTokenizer.from_pretrained(args.model)
print(f"before: perplexity {evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")

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
Trainer(model, arguments, train_dataset=data, callbacks=[SparsityCallback()]).train()

print(f"after: perplexity {evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")
model.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
