"""Fine-tune a sparse model with LoRA and merge it: the merged model is as sparse, with the outputs of the trained one.

python examples/finetune_lora.py --model qwen3-70 --train train.txt --evaluate wikitext2 --output qwen3-70-tuned
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from optimum_neuronal import SparsityCallback, evaluate_perplexity, keep_lora_sparse


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory of a sparse model")
parser.add_argument("--train", type=Path, required=True, help="file with training text")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--output", type=Path, required=True, help="directory for the tuned model")
parser.add_argument("--steps", type=int, default=200, help="(default: 200)")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
parser.add_argument("--rank", type=int, default=16, help="of the update (default: 16)")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(args.model)
print(f"before: perplexity {evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")

adapted = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
keep_lora_sparse(adapted)  # after PeftModel.from_pretrained too: nothing of it is saved with the adapter
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
Trainer(adapted, arguments, train_dataset=data, callbacks=[SparsityCallback()]).train()
adapted.save_pretrained(args.output / "adapter")

merged = adapted.merge_and_unload()
print(f"after: perplexity {evaluate_perplexity(merged, tokenizer, args.evaluate, args.length):.2f}")
merged.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
