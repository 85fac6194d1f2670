"""Fine-tune a sparse model with TRL's SFTTrainer: every weight that was pruned stays zero, with LoRA too.

python examples/finetune_trl.py --model qwen3-70 --train train.jsonl --evaluate wikitext2 --output qwen3-70-tuned

Each line of train.jsonl is {"text": "..."}. It needs `pip install trl '.[train,peft]'`.
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import optimum_neuronal as neuronal


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory of a sparse model")
parser.add_argument("--train", type=Path, required=True, help="jsonl file with training text")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--output", type=Path, required=True, help="directory for the tuned model")
parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
instead = parser.add_mutually_exclusive_group()
instead.add_argument("--lora", action="store_true", help="train LoRA and merge it, instead of all weights")
instead.add_argument("--packed", action="store_true", help="train LoRA on packed weights, and save the adapter")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
model = neuronal.sparsify(model) if args.packed else model
tokenizer = AutoTokenizer.from_pretrained(args.model)
print(f"before: perplexity {neuronal.evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")

config = neuronal.lora_for_packed(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
if args.lora or args.packed:  # not by SFTTrainer's peft_config: keep_lora_sparse comes before training
    model = get_peft_model(model, config)
    model = model if args.packed else neuronal.keep_lora_sparse(model)
arguments = SFTConfig(
    args.output,
    use_cache=True,  # Trainer would set it to false in config.json
    max_steps=args.steps,
    max_length=args.length,
    packing=True,
    packing_strategy="wrapped",  # text is cut into sequences of max_length tokens
    per_device_train_batch_size=8,
    learning_rate=2e-3 if args.lora or args.packed else 5e-4,
    lr_scheduler_type="cosine",
    save_strategy="no",
    report_to="none",
    bf16=False,  # as the model is; TRL's default is bfloat16, which not every processor computes with
)
data = load_dataset("json", data_files=str(args.train), split="train")
kept = [] if args.packed else [neuronal.SparsityCallback()]  # nothing changes packed weights
SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=kept).train()

model = model.merge_and_unload() if args.lora else model
print(f"after: perplexity {neuronal.evaluate_perplexity(model, tokenizer, args.evaluate, args.length):.2f}")
model.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
