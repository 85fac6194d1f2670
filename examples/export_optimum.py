"""Export a dense sparse checkpoint to ONNX or OpenVINO by optimum, and check logits and zeros.

python examples/export_optimum.py --model qwen3-70 --to onnx --output qwen3-70-onnx

It runs in an environment of its own, without this package: `pip install optimum-onnx[onnxruntime]` or `pip install
optimum-intel[openvino]` brings the older transformers that these require.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True, help="directory of a sparse model in the dense format")
parser.add_argument("--to", choices=("onnx", "openvino"), required=True, help="format to export to")
parser.add_argument("--output", type=Path, required=True, help="directory for the exported model")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
if args.to == "onnx":
    from optimum.onnxruntime import ORTModelForCausalLM

    exported = ORTModelForCausalLM.from_pretrained(args.model, export=True)
else:
    from optimum.intel import OVModelForCausalLM

    exported = OVModelForCausalLM.from_pretrained(args.model, export=True, load_in_8bit=False)
exported.save_pretrained(args.output)


def stored_matrices() -> Iterator[np.ndarray]:
    """Yield the matrices in the files that were written."""
    if args.to == "onnx":
        import onnx

        graph = onnx.load(args.output / "model.onnx").graph
        yield from (onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer if len(tensor.dims) == 2)
    else:
        import openvino

        constants = openvino.Core().read_model(args.output / "openvino_model.xml").get_ops()
        constants = (node for node in constants if node.get_type_name() == "Constant")
        yield from (node.data for node in constants if len(node.get_output_shape(0)) == 2)


ids = torch.arange(2 * 32).view(2, 32) % model.config.vocab_size
with torch.inference_mode():
    dense = model(ids).logits
logits = torch.as_tensor(exported(input_ids=ids, attention_mask=torch.ones_like(ids)).logits)
print(f"logits of up to {dense.abs().max():.1f} differ by at most {(logits - dense).abs().max():.1e}")
before = [value.detach().numpy() for value in model.base_model.parameters() if value.ndim == 2]
counts = [sum(int((matrix == 0).sum()) for matrix in matrices) for matrices in (before, stored_matrices())]
print(f"zeros in matrices: {counts[0]:,} in the checkpoint, {counts[1]:,} in {args.output}")
