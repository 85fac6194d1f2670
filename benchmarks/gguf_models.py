"""Makes GGUF files of Llama models with random weights, quantised as llama.cpp's `llama-quantize` would.

`llama-quantize --dry-run` says which type each tensor gets. Of each type and length, 64 rows are quantised and repeated,
since speed does not depend on the values and some types take minutes for a whole model.
"""

import ctypes
from functools import cache
from pathlib import Path

import gguf
import numpy as np

from benchmarks.gguf_types import planned_types
from benchmarks.same_shapes import Shape


ROWS = 64
Types = gguf.GGMLQuantizationType


class Quantizer:
    """Random rows, quantised by the library of a build of llama.cpp."""

    def __init__(self, programs: Path):
        libraries = sorted(programs.glob("*ggml-base.*"))
        if not libraries:
            raise FileNotFoundError(
                f"There is no libggml-base in {programs}: name the folder with llama.cpp's programs."
            )
        self._library = ctypes.CDLL(str(libraries[0]))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._library.ggml_row_size.restype = self._library.ggml_quantize_chunk.restype = ctypes.c_size_t
        self._library.ggml_row_size.argtypes = (ctypes.c_int, size)
        self._library.ggml_quantize_chunk.argtypes = (ctypes.c_int, pointer, pointer, size, size, size, pointer)
        self._library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        self.rows = cache(self._rows)

    def _rows(self, kind: gguf.GGMLQuantizationType, columns: int) -> np.ndarray:
        """Bytes of shape (64, bytes of a row)."""
        values = np.random.default_rng(0).standard_normal((ROWS, columns), dtype=np.float32) * 0.02
        return self.quantise(kind, values, np.ones(columns, dtype=np.float32))

    def quantise(
        self, kind: gguf.GGMLQuantizationType, values: np.ndarray, importance: np.ndarray | None
    ) -> np.ndarray:
        """Bytes of shape (rows, bytes of a row), of float32 values of shape (rows, columns).

        Args:
            kind: of the bytes.
            values: to quantise.
            importance: of each column, float32; some types are refused without.
        """
        if kind == Types.BF16:
            return gguf.quants.quantize(values, kind)
        if importance is None and self._library.ggml_quantize_requires_imatrix(kind):
            raise ValueError(f"llama.cpp quantises to {kind.name} with an importance of columns only")
        rows, columns = values.shape
        found = np.zeros((rows, self._library.ggml_row_size(kind, columns)), dtype=np.uint8)
        arrays = values.ctypes.data, found.ctypes.data
        weights = None if importance is None else importance.ctypes.data
        self._library.ggml_quantize_chunk(kind, *arrays, 0, rows, columns, weights)
        return found

    def weight(self, kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
        """Bytes of shape (rows, bytes of a row)."""
        return np.resize(self.rows(kind, columns), (rows, self.rows(kind, columns).shape[1]))


def write_model(target: Path, shape: Shape, quantizer: Quantizer, plan: dict[str, str], kind: str = "BF16") -> int:
    """Writes a file whose tensors have the types of a plan, bfloat16 those that it does not name.

    Returns:
        `int`: bytes of the projections.
    """
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_value_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)

    def add(name: str, rows: int, columns: int) -> int:
        own = Types[plan.get(name, "bf16").upper()]
        weight = quantizer.weight(own, rows, columns)
        writer.add_tensor(name, weight, raw_dtype=own)
        return weight.nbytes

    norm, size = np.ones(shape.hidden, dtype=np.float32), 0
    add("token_embd.weight", shape.vocabulary, shape.hidden)  # the head too
    writer.add_tensor("output_norm.weight", norm)
    for block in range(shape.layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{block}.{name}.weight", norm)
        size += sum(add(f"blk.{block}.{name}.weight", *sizes) for name, sizes in shape.projections().items())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return size


def write_models(folder: Path, shape: Shape, kinds: list[str], programs: Path) -> dict[str, tuple[Path, int]]:
    """Writes a file for each kind (`"Q4_0"`), and returns its path and the bytes of its projections."""
    folder.mkdir(parents=True, exist_ok=True)
    quantizer, plain = Quantizer(programs), folder / "BF16.gguf"
    write_model(plain, shape, quantizer, {})
    found = {}
    for kind in kinds:
        plan = {} if kind == "BF16" else planned_types(programs, plain, kind)
        path = folder / f"{kind}.gguf"
        found[kind] = path, write_model(path, shape, quantizer, plan, kind)
    return found
