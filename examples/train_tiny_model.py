"""Train a small language model on the source of Python's standard library (15-30 minutes on two cores).

    python examples/train_tiny_model.py --output tiny-model

Writes the model (bf16), its byte-level BPE tokenizer, and two texts that the training never saw: calibration.txt and
heldout.txt. Files are assigned by a hash of their name, so the split is always the same. Run the same command again to
resume after an interruption.
"""

import argparse
import hashlib
import sysconfig
from pathlib import Path

import tokenizers
import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint


END, LENGTH = "<|endoftext|>", 256
SKIP = {"site-packages", "__pycache__", "encodings", "pydoc_data", "data", "cjkencodings"}  # tables, not prose


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--output", type=Path, required=True, help="directory to write")
parser.add_argument("--model-type", default="llama", help="llama (default), mistral, opt, phi, qwen2, ...")
parser.add_argument("--steps", type=int, default=3000, help="steps of 8 sequences of 256 tokens (default: 3000)")
parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the text (default: 0)")
args = parser.parse_args()
transformers.set_seed(args.seed)
library, texts = Path(sysconfig.get_paths()["stdlib"]), {"train": [], "calibration": [], "heldout": []}
for file in sorted(library.rglob("*.py")):
    name = file.relative_to(library).as_posix()
    digest = hashlib.sha256(name.encode()).digest()
    part = {0: "heldout", 1: "calibration"}.get(digest[0] % 25, "train")
    if not SKIP & set(Path(name).parts):
        texts[part].append((digest, file.read_text(encoding="utf-8", errors="replace")))
texts = {part: [text for _, text in sorted(files)] for part, files in texts.items()}  # in the hash's order: mixed
bpe = tokenizers.ByteLevelBPETokenizer()
bpe.train_from_iterator(texts["train"], vocab_size=4096, special_tokens=[END], show_progress=False)
names = {"bos_token": END, "eos_token": END, "pad_token": END, "model_max_length": 2 * LENGTH}
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names)
ids = [i for text in tokenizer(texts["train"], verbose=False)["input_ids"] for i in [*text, tokenizer.eos_token_id]]
windows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4}
shape |= {"num_key_value_heads": 4, "ffn_dim": 384, "tie_word_embeddings": True, "vocab_size": len(tokenizer)}
shape |= {"max_position_embeddings": 2 * LENGTH, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
known = transformers.AutoConfig.for_model(args.model_type).to_dict()
config = transformers.AutoConfig.for_model(args.model_type, **{k: v for k, v in shape.items() if k in known})
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
print(f"{model.num_parameters():,} parameters, {windows.numel():,} training tokens")
how = {"learning_rate": 2e-3, "warmup_steps": 150, "lr_scheduler_type": "cosine", "max_steps": args.steps}
how |= {"per_device_train_batch_size": 8, "weight_decay": 0.1, "adam_beta2": 0.95, "seed": args.seed}
how |= {"logging_steps": 100, "save_steps": 250, "save_total_limit": 1, "report_to": "none"}
training = transformers.TrainingArguments(args.output / "training", dataloader_pin_memory=False, **how)
data = [{"input_ids": window, "labels": window} for window in windows]
last = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
transformers.Trainer(model, training, train_dataset=data).train(resume_from_checkpoint=last)
model.config.use_cache = True  # Trainer turned it off
model.to(torch.bfloat16).save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
for part in ("calibration", "heldout"):  # a slice of every file, for variety
    slices = [text[len(text) // 3 :][:4000] for text in texts[part]]
    (args.output / f"{part}.txt").write_text("\n\n".join(slices)[:160_000], encoding="utf-8")
