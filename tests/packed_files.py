"""A small packed checkpoint with every form of weight, for tests that read and damage it."""

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from optimum_neuronal.checkpoint.packed_reading import open_checkpoint
from optimum_neuronal.checkpoint.stored_weights import packed_seed
from optimum_neuronal.checkpoint.weight_writers import PackedWriter
from optimum_neuronal.packed.formats.packed_matrix import PackedMatrix
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import SparseWeight


FILE = "packed-00001-of-00001.safetensors"
SPARSE, QUANTIZED, BYTES = "layers.0.up_proj.weight", "layers.0.q_proj.weight", "embed_tokens.weight"
SPARSE_TRANSPOSED, QUANTIZED_TRANSPOSED = "layers.0.down_proj.weight", "layers.0.k_proj.weight"


@cache
def packed() -> dict[str, PackedMatrix]:
    """Packed weights by name. Rows and columns leave room in the last block, group and word."""
    generator = torch.Generator().manual_seed(0)

    def dense(*shape, kept=1.0):
        return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < kept)

    codes = torch.randint(8, (70, 9), generator=generator, dtype=torch.uint8)
    scales, steps = (dense(size).abs().add(0.1).bfloat16() for size in (70, 9))
    return {
        SPARSE: SparseWeight.pack(dense(70, 9, kept=0.3).bfloat16()),
        SPARSE_TRANSPOSED: SparseWeight.pack(dense(70, 9, kept=0.3)),
        QUANTIZED: QuantizedWeight.encode(codes, 3, scales, steps),
        QUANTIZED_TRANSPOSED: QuantizedWeight.nearest(dense(66, 6).half(), 2),
        BYTES: QuantizedWeight.nearest(dense(5, 12), 8),
    }


def is_transposed(name: str) -> bool:
    return name in (SPARSE_TRANSPOSED, QUANTIZED_TRANSPOSED)


def plain() -> dict[str, torch.Tensor]:
    """Return what is stored as it is."""
    return {"norm.weight": torch.randn(3, generator=torch.Generator().manual_seed(1)), "steps": torch.tensor(7)}


def tensors() -> dict[str, torch.Tensor]:
    """Return what the checkpoint holds, dense."""
    dense = {name: weight.unpack() for name, weight in packed().items()}
    return {name: weight.mT if is_transposed(name) else weight for name, weight in dense.items()} | plain()


def write(folder, max_shard_size="1GB") -> None:
    """Write the checkpoint into a folder."""
    for name, content in _files(max_shard_size).items():
        (folder / name).write_bytes(content)


@cache
def _files(max_shard_size) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        with PackedWriter(folder, max_shard_size) as writer:
            for name, weight in packed().items():
                writer.add_packed(name, weight, is_transposed(name))
            for name, tensor in plain().items():
                writer.add(name, tensor)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def read(folder) -> dict[str, torch.Tensor]:
    """Read the whole checkpoint, with all checks."""
    return {name: weight[...] for file in open_checkpoint(folder) for name, weight in file.weights.items()}


def header_of(content: bytes) -> tuple[dict, dict, bytes]:
    """Return the header of a file, the metadata in it, and what follows."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["neuronal"]), content[8 + length :]


def with_header(header: dict, about: dict | None, data: bytes) -> bytes:
    """Return a file of a header, its metadata, unless they are None, and data."""
    if about is not None:
        header["__metadata__"]["neuronal"] = json.dumps(about)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def change(path: Path, name: str, edit: Callable[[dict, dict, dict], None]) -> None:
    """Edit a weight in a file, and keep its checksum and all places right.

    `edit(facts, parts, headers)` gets the weight's metadata, and the bytes and headers of its tensors, by their names in the
    format: `"codes"`.
    """
    header, about, data = header_of(path.read_bytes())
    facts, metadata = about["tensors"][name], header.pop("__metadata__")
    begin = name + ".packed_"
    keys = [key.removeprefix(begin) for key in about_order(header, begin)]
    headers = {key: header[begin + key] for key in keys}
    stored = {key: data[slice(*header[key]["data_offsets"])] for key in header}
    parts = {key: bytearray(stored.pop(begin + key)) for key in keys}
    edit(facts, parts, headers)
    with suppress(KeyError, TypeError, AttributeError):
        transposed = facts.get("transposed", False)
        seed = packed_seed(name, facts["dtype"], facts["shape"], facts["format"], transposed)
        facts["crc32"] = f"{zlib.crc32(b''.join(parts.values()), seed):08x}"
    stored |= {begin + key: bytes(part) for key, part in parts.items()}
    entries, position = {"__metadata__": metadata}, 0
    for key, part in stored.items():
        place = [position, position + len(part)]
        entries[key] = {
            **(headers[key.removeprefix(begin)] if key.startswith(begin) else header[key]),
            "data_offsets": place,
        }
        position += len(part)
    path.write_bytes(with_header(entries, about, b"".join(stored.values())))


def about_order(header: dict, begin: str) -> list[str]:
    """Return the names of a weight's tensors in the order of checksums, by which they begin."""
    order = ("bits", "values", "codes", "scales", "steps")
    return [begin + key for key in order if begin + key in header]
