"""Time products with packed weights against torch's dense ones on a GPU, or count the instructions of the kernels without one.

    python -m benchmarks.gpu_kernels [--shapes 4096x14336] [--sparsity 0.6] [--dtype float16]
    python -m benchmarks.gpu_kernels --count

Products run in CUDA graphs, on copies of a weight that take turns, so that none is in a cache. `--count` compiles the kernels for
three GPUs, and counts what a thread does in the loop. The bounds say how many times as long as a packed product a dense one takes if
only this counted: instructions, or reading the weights from memory. They leave out caches and latency.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product

import torch
from torch.nn.functional import linear

from benchmarks.shared import milliseconds
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.common.torch_state import default_device
from optimum_neuronal.packed.grouped_weight import GroupedWeight, find_kernels
from optimum_neuronal.packed.ops import sparse_linear
from optimum_neuronal.packed.packed_weight import PackedWeight


SHAPES = ("2048x2048", "8192x2048", "2048x8192", "4096x4096", "4096x14336", "14336x4096")  # rows x columns
SPARSITIES = (0.5, 0.6, 0.7, 0.8)
COPIES_BYTES = 2**29  # of dense weights together
PROMPT = 2048  # tokens
# By architecture: name, processors, GHz, bytes per second, and 10^12 dense operations per second in bfloat16. Those were measured on the
# H100; all else is from data sheets.
GPUS = {
    80: ("A100", 108, 1.41, 2.04e12, 312),
    89: ("RTX 4090", 128, 2.52, 1.01e12, 165),
    90: ("H100", 132, 1.75, 3.35e12, 603),
}
LANES = 128  # instructions of threads that a processor starts in a cycle
VECTORS = (1, 8)
PLAIN = {"bias": None, "chosen": None}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def random_weight(rows: int, columns: int, sparsity: float, device: torch.device | str = "cpu") -> torch.Tensor:
    return (
        torch.randn(rows, columns, device=device)
        .masked_fill_(torch.rand(rows, columns, device=device) < sparsity, 0)
        .bfloat16()
    )


def compiled(vectors: int, architecture: int | str, dtype: torch.dtype = torch.bfloat16, fixed: Mapping = PLAIN):
    """Compile the kernel of a product with so many vectors, or of a dense copy for 0, as for a call with a large weight.

    `architecture`: a number for NVIDIA, a name for AMD. `fixed`: arguments that are None or 1, which Triton compiles in.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from optimum_neuronal.packed import triton_kernels

    kernel = triton_kernels._multiply if vectors else triton_kernels._fill
    types = dict.fromkeys(("values", "y", "dense", "x", "bias"), f"*{TYPES[dtype]}")
    types |= {"index": "*u8", "base": "*u16", "starts": "*i32", "chosen": "*i64"}
    types |= dict.fromkeys(("count", "rows", "columns", "experts"), "i32")
    names = kernel.arg_names
    constants = {name: value for name, value in fixed.items() if name in names}
    constants |= {
        "SLOTS": triton_kernels.MOST_SLOTS,
        "WIDTH": triton_kernels.WIDTH if vectors == 1 else triton_kernels.WIDTH_OF_MANY,
    }
    if vectors:
        constants["COUNT"] = vectors
    else:
        types |= dict.fromkeys(("values", "dense"), f"*i{8 * dtype.itemsize}")
    if vectors > 1:
        types["x"] = "*i64"
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] != "constexpr"}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    is_amd = isinstance(architecture, str)
    target = GPUTarget("hip" if is_amd else "cuda", architecture, 64 if is_amd else 32)
    return triton.compile(source, target=target, options={"num_warps": triton_kernels.MOST_SLOTS // 256})


def instructions(kernel) -> float:
    """Return the instructions of a thread's loop for each slot of the weight."""
    labels, loops, length = {}, [], 0
    for line in disassembled(kernel, "nvdisasm", "-c").splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = length
        length += bool(re.match(r"\s+/\*[0-9a-f]{4,}\*/", line))
        if (target := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and target[1] in labels:
            loops.append(length - labels[target[1]])
    return max(loops) / 8


def registers(kernel) -> int:
    """Return the registers of a thread."""
    return int(re.search(r"REG:(\d+)", disassembled(kernel, "cuobjdump", "-res-usage"))[1])


def disassembled(kernel, tool: str, option: str) -> str:
    """Return what a tool that comes with Triton says of a kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, option, file.name]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def count() -> Iterator[str]:
    """Yield tables of instructions, memory and bounds."""
    torch.manual_seed(0)
    weights = {sparsity: random_weight(256, 4096, sparsity) for sparsity in SPARSITIES}
    grouped = {sparsity: GroupedWeight.from_packed(PackedWeight.pack(weight)) for sparsity, weight in weights.items()}
    slots = {sparsity: len(weight.values) / weights[sparsity].numel() for sparsity, weight in grouped.items()}
    shares = {sparsity: weight.nbytes / weights[sparsity].nbytes for sparsity, weight in grouped.items()}
    header = ["sparsity", *(f"{sparsity:.0%}" for sparsity in SPARSITIES)]
    bits = [8 * weight.nbytes / weights[sparsity].count_nonzero() for sparsity, weight in grouped.items()]
    rows = [
        ["bits per nonzero", *(f"{each:.1f}" for each in bits)],
        ["share of the dense size", *(f"{share:.3f}" for share in shares.values())],
        ["bound", *(f"{1 / share:.2f}" for share in shares.values())],
    ]
    yield "Dense time / packed time if only reading rows of 4096 weights counted\n\n" + format_markdown(header, rows)
    rows, prompts = [], []
    for architecture, (name, processors, gigahertz, bandwidth, teraflops) in GPUS.items():
        per_second = 1e9 * gigahertz * processors * LANES
        for vectors in VECTORS:
            kernel = compiled(vectors, architecture)
            each, used = instructions(kernel), registers(kernel)
            bounds = [f"{2 / bandwidth * per_second / (each * slots[sparsity]):.2f}" for sparsity in SPARSITIES]
            rows.append([f"{name} (sm_{architecture})", vectors, f"{each:.1f}", used, *bounds])
        dense = 2 * PROMPT / (1e12 * teraflops)  # seconds for each element
        issue = instructions(compiled(0, architecture)) / per_second
        for scratch, more in (("in the cache", 0), ("in memory", 2)):
            times = [max((2 * shares[s] + more) / bandwidth, issue * slots[s]) for s in SPARSITIES]
            prompts.append([name, scratch, *(f"{time / dense:.1%}" for time in times)])
    shown = ["GPU", "vectors", "instructions per nonzero", "registers", *header[1:]]
    table = format_markdown(shown, [list(map(str, row)) for row in rows])
    yield f"Dense time / packed time if only instructions counted\n\n{table}"
    header = ["GPU", "unpacked window", *header[1:]]
    yield f"Unpacking for {PROMPT} tokens, as a share of the dense product\n\n" + format_markdown(header, prompts)


def in_graph(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Return the milliseconds of a call, which are captured in one CUDA graph."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # compiles, and makes workspaces
        calls[0]()
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return milliseconds(device, graph.replay, 20) / len(calls)


def measure(
    shape: tuple[int, int], sparsity: float, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Return dense time / packed time for numbers of vectors and for a prompt, and the milliseconds of unpacking."""
    weight = random_weight(*shape, sparsity, device).to(dtype)
    packed, copies = PackedWeight.pack(weight), min(64, max(2, COPIES_BYTES // weight.nbytes))
    dense_weights = [weight.clone() for _ in range(copies)]
    packed_weights = [GroupedWeight.from_packed(packed) for _ in range(copies)]
    result = {"share of the dense size": packed_weights[0].nbytes / weight.nbytes}
    for tokens in (1, 2, 4, 8, 64, PROMPT):
        x = torch.randn(tokens, shape[1], device=device).to(dtype)
        torch.testing.assert_close(packed_weights[0].multiply(x), linear(x, weight), rtol=2e-2, atol=0.5)
        dense = in_graph([partial(linear, x, one) for one in dense_weights], device)
        sparse = in_graph([partial(sparse_linear, one, x) for one in packed_weights], device)
        result |= {f"dense ms, {tokens}": dense, f"ratio, {tokens}": dense / sparse}
    result["unpack ms"] = in_graph([one.to_dense for one in packed_weights], device)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="count instructions: needs no GPU")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help=f"rows x columns (default: {' '.join(SHAPES)})")
    parser.add_argument("--sparsity", nargs="+", type=float, default=SPARSITIES, help="(default: 0.5 0.6 0.7 0.8)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="(default: bfloat16)")
    args = parser.parse_args()
    if args.count:
        for table in count():
            print(table, end="\n\n", flush=True)
        return
    device = default_device()
    if device.type != "cuda" or find_kernels(device) is None:
        parser.error(f"the device is {device}: expected a GPU with Triton, or --count, which needs none")
    print(torch.cuda.get_device_name(device))
    rows = []
    for shape, sparsity in product(args.shapes, args.sparsity):
        figures = measure(tuple(map(int, shape.split("x"))), sparsity, device, getattr(torch, args.dtype))
        rows.append([shape, f"{sparsity:.0%}", *(f"{figure:.3f}" for figure in figures.values())])
        print(" | ".join(rows[-1]), flush=True)
    print(format_markdown(["shape", "sparsity", *figures], rows))


if __name__ == "__main__":
    main()
