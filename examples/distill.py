"""Retrain a sparse model toward the predictions of its dense teacher (cross-entropy of the next-token distributions).

python examples/distill.py --model qwen3-70 --teacher Qwen/Qwen3-0.6B --train c4 --evaluate wikitext2 --output tuned
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from optimum_neuronal import SparsityCallback, evaluate_perplexity, keep_lora_sparse
from optimum_neuronal.common.device import default_device
from optimum_neuronal.data.calibration import draw_windows, resolve_bos


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="Hub id or directory of a sparse model")
parser.add_argument("--teacher", required=True, help="Hub id or directory of the dense model")
parser.add_argument("--train", default="c4", help="training text: a name, Hub id or file (default: c4)")
parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
parser.add_argument("--window", type=int, help="tokens of a test window (default: 2048, or the model's limit)")
parser.add_argument("--windows", type=int, help="test windows (default: all)")
parser.add_argument("--output", type=Path, required=True, help="directory for the retrained model")
parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
parser.add_argument("--batch", type=int, default=8, help="sequences per step (default: 8)")
parser.add_argument("--sequences", type=int, help="of the text; more steps repeat them (default: steps x batch)")
parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA and merge it, instead of all weights")
parser.add_argument("--learning-rate", type=float, help="peak learning rate (default: 5e-4, or 2e-3 with --lora)")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence (default: 256)")
parser.add_argument("--bf16", action="store_true", help="multiply in bfloat16, for GPUs and CPUs that do so faster")
args = parser.parse_args()

# AdamW's small steps need the precision.
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(default_device())
tokenizer = AutoTokenizer.from_pretrained(args.model)
test = {"dataset": args.evaluate, "seq_length": args.window, "max_windows": args.windows}
print(f"before: perplexity {evaluate_perplexity(model, tokenizer, **test):.2f}")
if args.lora:  # needs the extra [peft]
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear")
    model = keep_lora_sparse(get_peft_model(model, config))


class Distiller(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        with torch.no_grad():
            expected = teacher(input_ids=inputs["input_ids"]).logits.float().softmax(-1).flatten(0, 1)
        # Its gradient is that of the KL divergence, which takes longer.
        loss = cross_entropy(outputs.logits.float().flatten(0, 1), expected)
        return (loss, outputs) if return_outputs else loss


sizes = {
    "num_samples": args.sequences or args.steps * args.batch,
    "seq_length": args.length,
    "seed": 0,
    "vocab_size": len(tokenizer),
}
windows = draw_windows(args.train, tokenizer, **sizes, bos=resolve_bos(model.config, tokenizer)).ids
rate = args.learning_rate or (2e-3 if args.lora else 5e-4)
how = {"max_steps": args.steps, "per_device_train_batch_size": args.batch, "learning_rate": rate}
how |= {"lr_scheduler_type": "cosine", "warmup_steps": args.steps // 20, "save_strategy": "no", "report_to": "none"}
how |= {"bf16": args.bf16, "use_cpu": model.device.type == "cpu"}
how |= {"use_cache": True}  # Trainer would set it to false in config.json
arguments = TrainingArguments(args.output, **how)
dtype = torch.bfloat16 if args.bf16 else "auto"
teacher = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=dtype).to(arguments.device).eval()
data = [{"input_ids": window, "labels": window} for window in windows]
trainer = Distiller(model, arguments, train_dataset=data, callbacks=[SparsityCallback()])
trainer.model_accepts_loss_kwargs = False  # the loss is a mean, so Trainer averages accumulated ones
start = time.perf_counter()
trainer.train()
print(f"trained for {time.perf_counter() - start:.0f} seconds")

model = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # its forward without bfloat16
model = model.merge_and_unload() if args.lora else model
print(f"after: perplexity {evaluate_perplexity(model, tokenizer, **test):.2f}")
model.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
