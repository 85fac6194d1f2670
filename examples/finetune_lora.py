"""Fine-tune a sparse model with LoRA and merge it: the merged model keeps its zeros and computes what the trained one did.

python examples/finetune_lora.py --model qwen3-70 --train train.txt --evaluate wikitext2 --output qwen3-70-tuned

With --packed the weights stay packed during training. The merge then drops the updates of pruned weights.
"""

import argparse
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import optimum_neuronal as neuronal
from optimum_neuronal.evaluation.perplexity import load_windows


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory of a sparse model")
parser.add_argument("--train", type=Path, required=True, help="file with training text")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--output", type=Path, required=True, help="directory for the tuned model")
parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
parser.add_argument("--rank", type=int, default=16, help="of LoRA (default: 16)")
parser.add_argument("--packed", action="store_true", help="keep weights packed until adapters are merged")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
model = neuronal.sparsify(model) if args.packed else model
tokenizer = AutoTokenizer.from_pretrained(args.model)
print(f"before: perplexity {neuronal.evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")

config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
adapted = get_peft_model(model, neuronal.lora_for_packed(model, config))
if not args.packed:
    neuronal.keep_lora_sparse(adapted)  # also after PeftModel.from_pretrained: adapters do not record the masks
windows = load_windows(model.config, tokenizer, args.train, args.length).ids  # of Gemma models, each begins with BOS
arguments = TrainingArguments(
    args.output,
    use_cache=True,  # Trainer would set it to false in config.json
    max_steps=args.steps,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=args.steps // 20,
    save_strategy="no",
    report_to="none",
)
data = [{"input_ids": window, "labels": window} for window in windows]
kept = [] if args.packed else [neuronal.SparsityCallback()]  # nothing changes packed weights
Trainer(adapted, arguments, train_dataset=data, callbacks=kept).train()
adapted.save_pretrained(args.output / "adapter")
print(f"after: perplexity {neuronal.evaluate_perplexity(adapted, tokenizer, args.evaluate, args.length):.2f}")
if args.packed:
    neuronal.keep_lora_sparse(neuronal.densify(adapted))
merged = adapted.merge_and_unload()
print(f"merged: perplexity {neuronal.evaluate_perplexity(merged, tokenizer, args.evaluate, args.length):.2f}")
merged.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
