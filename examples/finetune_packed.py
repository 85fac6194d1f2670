"""Fine-tune a sparse model with LoRA while its weights stay packed, then merge: the merged model is as sparse.

python examples/finetune_packed.py --model qwen3-70 --train train.txt --evaluate wikitext2 --output qwen3-70-tuned
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Trainer, TrainingArguments

from optimum_neuronal import SparseModelForCausalLM, densify, evaluate_perplexity, keep_lora_sparse, lora_for_packed


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory of a sparse model")
parser.add_argument("--train", type=Path, required=True, help="file with training text")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--output", type=Path, required=True, help="directory for the adapter and the merged model")
parser.add_argument("--steps", type=int, default=200, help="(default: 200)")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
parser.add_argument("--rank", type=int, default=16, help="of the update (default: 16)")
args = parser.parse_args()

model = SparseModelForCausalLM.from_pretrained(args.model, dtype="auto")  # never dense in memory
tokenizer = AutoTokenizer.from_pretrained(args.model)
print(f"before: perplexity {evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")

config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
model = get_peft_model(model, lora_for_packed(model, config))
ids = torch.tensor(tokenizer(args.train.read_text(encoding="utf-8"), verbose=False)["input_ids"])
windows = ids[: len(ids) // args.length * args.length].view(-1, args.length)
arguments = TrainingArguments(
    args.output / "checkpoints",
    max_steps=args.steps,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=args.steps // 20,
    save_strategy="no",
    report_to="none",
)
data = [{"input_ids": window, "labels": window} for window in windows]
Trainer(model, arguments, train_dataset=data).train()
model.save_pretrained(args.output / "adapter")
print(f"after: perplexity {evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")

merged = keep_lora_sparse(densify(model)).merge_and_unload()  # leaves the update of pruned weights out
print(f"merged: perplexity {evaluate_perplexity(merged, tokenizer, args.evaluate, args.length):.2f}")
merged.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
