"""Convert a dense sparse checkpoint to GGUF, quantize it, and check what llama.cpp makes of it.

python examples/export_gguf.py --model qwen3-70 --llama-cpp ~/llama.cpp --text wiki.test.raw --output qwen3-70-gguf

It needs a built llama.cpp (convert_hf_to_gguf.py; build/bin with llama-quantize and llama-perplexity) and `pip install gguf`.
"""

import argparse
import math
import re
import subprocess
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="directory of a sparse model in the dense format")
parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's repository, built in build/")
parser.add_argument("--text", type=Path, required=True, help="file with test text")
parser.add_argument("--output", type=Path, required=True, help="directory for the GGUF files")
parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_0"], help="quantized types (default: Q8_0 Q4_0)")
parser.add_argument("--length", type=int, default=512, help="tokens per window (default: 512)")
args = parser.parse_args()

f32, programs = args.output / "F32.gguf", args.llama_cpp / "build" / "bin"
script = args.llama_cpp / "convert_hf_to_gguf.py"
for path in (Path(args.model), args.text, script, programs / "llama-quantize", programs / "llama-perplexity"):
    if not path.exists():
        parser.error(f"{path} does not exist")
args.output.mkdir(parents=True, exist_ok=True)
subprocess.run([sys.executable, script, args.model, "--outtype", "f32", "--outfile", f32], check=True)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
windows = ids[0, : ids.numel() // args.length * args.length].view(-1, args.length)
with torch.inference_mode():  # as llama-perplexity: the second half of each window is scored
    losses = [
        torch.nn.functional.cross_entropy(
            model(row[None]).logits[0, args.length // 2 : -1], row[args.length // 2 + 1 :]
        )
        for row in windows
    ]
print(f"transformers: perplexity {math.exp(sum(losses) / len(losses)):.4f}")
before = [value.detach() for value in model.base_model.parameters()]
after = [tensor.data for tensor in GGUFReader(f32).tensors if tensor.name != "output.weight"]  # the head
counts = [sum(int((matrix == 0).sum()) for matrix in matrices if matrix.ndim > 1) for matrices in (before, after)]
print(f"zeros in matrices: {counts[0]:,} in the checkpoint, {counts[1]:,} in {f32}")
for kind in ["F32", *args.types]:
    file = args.output / f"{kind}.gguf"
    if kind != "F32":
        subprocess.run([programs / "llama-quantize", f32, file, kind], check=True, capture_output=True)
    command = [programs / "llama-perplexity", "-m", file, "-f", args.text, "-c", str(args.length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    perplexity = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr).group(1)
    print(f"{kind}: {file.stat().st_size / 1e6:.2f} MB, perplexity {perplexity}")
