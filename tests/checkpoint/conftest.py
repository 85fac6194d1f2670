"""Packed checkpoints that were written."""

import pytest
from packed_files import FILE, write

from optimum_neuronal.checkpoint.names import PACKED_INDEX as INDEX


@pytest.fixture(scope="module", params=["packed", "coded"])
def folder(request, tmp_path_factory):
    """A checkpoint that tests may damage: they write the file anew each time. With and without quantised values."""
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, coded=request.param == "coded")
    return folder, (folder / FILE).read_bytes(), (folder / INDEX).read_bytes()


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A checkpoint without quantised values."""
    folder = tmp_path_factory.mktemp("packed")
    write(folder)
    return folder, (folder / FILE).read_bytes(), (folder / INDEX).read_bytes()
