"""A small packed checkpoint, for tests that read and damage it: with or without quantised values."""

import json
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import strategies as st

from optimum_neuronal.checkpoint.coding import find_codings
from optimum_neuronal.checkpoint.names import PACKED_INDEX
from optimum_neuronal.checkpoint.packed_reading import open_checkpoint
from optimum_neuronal.checkpoint.weight_writers import PackedWriter
from optimum_neuronal.formats.coded import CodedWeight


FILE = "packed-00001-of-00001.safetensors"
NAME = "layers.0.up_proj.weight"
TRANSPOSED = "layers.0.down_proj.weight"
BITS = 3
SPARSITY_CONFIG = {
    "block_sparsity": {"layers.0": 0.7},
    "projections": {
        "up_proj": {"sparsity": 0.7, "weights": ["layers.*.up_proj.weight"]},
        "down_proj": {"sparsity": 0.7, "weights": ["layers.*.down_proj.weight"], "transposed": True},
    },
    "value_bits": BITS,
}


def tensors(size: float = 1.0) -> dict[str, torch.Tensor]:
    """What the checkpoint holds: two weights with many zeros and values of few bits, and two that are not packed.

    `size` is that of weights; those of 1 have short scales, those of 1000 do not.
    """
    generator = torch.Generator().manual_seed(0)
    weight = size * torch.randn(6, 5, generator=generator)
    weight[torch.rand(6, 5, generator=generator) < 0.7] = 0
    return {
        NAME: CodedWeight.nearest(weight.bfloat16(), BITS).unpack(),
        TRANSPOSED: CodedWeight.nearest(weight, BITS).unpack().T.contiguous(),
        "norm.weight": torch.randn(3, generator=generator),
        "steps": torch.tensor(7),
    }


def write(folder, max_shard_size="1GB", coded=False, size=1.0) -> None:
    """Writes it into a folder."""
    for name, content in _files(max_shard_size, coded, size).items():
        (folder / name).write_bytes(content)


@cache
def _files(max_shard_size, coded, size) -> dict[str, bytes]:
    codings = find_codings(SPARSITY_CONFIG, tensors(size)) if coded else ()
    with TemporaryDirectory() as folder:
        with PackedWriter(folder, max_shard_size, codings) as writer:
            for name, tensor in tensors(size).items():
                writer.add(name, tensor)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def read(folder) -> dict[str, torch.Tensor]:
    """Reads all of it, every check included."""
    return {name: weight[...] for file in open_checkpoint(folder) for name, weight in file.weights.items()}


def header_of(content: bytes) -> tuple[dict, dict, bytes]:
    """The header of a file, the metadata in it, and what follows."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["neuronal"]), content[8 + length :]


def with_header(header: dict, about: dict | None, data: bytes) -> bytes:
    """A file of a header, its metadata, unless they are None, and data."""
    if about is not None:
        header["__metadata__"]["neuronal"] = json.dumps(about)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(path: Path, name: str, ends, edit, seed) -> Path:
    """Edits a weight in a file, and keeps sizes and checksums right; returns the path.

    `edit(facts, parts, header)` gets its metadata, a bytearray for each end of its parts' names, and the header;
    `seed(facts)` returns the checksum's beginning.
    """
    header, about, data = header_of(path.read_bytes())
    facts = about["tensors"][name]
    stored = {key: data[slice(*header[key]["data_offsets"])] for key in header if key != "__metadata__"}
    parts = {end: bytearray(stored[name + end]) for end in ends}
    edit(facts, parts, header)
    stored |= {name + end: bytes(part) for end, part in parts.items()}
    with suppress(KeyError, TypeError):
        facts["crc32"] = f"{zlib.crc32(b''.join(bytes(part) for part in parts.values()), seed(facts)):08x}"
    position = 0
    for key, part in stored.items():
        header[key]["data_offsets"] = [position, position + len(part)]
        if key.endswith(".packed_codes") and len(header[key]["shape"]) == 1:
            header[key]["shape"] = [len(part)]
        position += len(part)
    path.write_bytes(with_header(header, about, b"".join(stored.values())))
    index = json.loads((path.parent / PACKED_INDEX).read_text())
    index["metadata"]["total_size"] = position
    (path.parent / PACKED_INDEX).write_text(json.dumps(index))
    return path


def put(part: str, values):
    """An edit that overwrites the first bytes of a part."""
    return lambda facts, parts, header: parts[part].__setitem__(slice(0, len(values)), values)


def fact(**values):
    """An edit of a weight's metadata."""
    return lambda facts, parts, header: facts.update(values)


def bfloat16(number: float) -> bytes:
    return bytes(torch.tensor([number]).bfloat16().view(torch.uint8).tolist())


def draw_bytes(data, parts) -> None:
    """Overwrites one to three bytes of a weight's parts with any."""
    for _ in range(data.draw(st.integers(1, 3))):
        part = parts[data.draw(st.sampled_from(sorted(parts)))]
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
