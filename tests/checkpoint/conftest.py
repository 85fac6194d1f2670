"""A packed checkpoint that was written."""

import pytest
from packed_files import FILE, write

from optimum_neuronal.checkpoint.names import PACKED_INDEX as INDEX


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that tests may damage: they write the file anew each time."""
    folder = tmp_path_factory.mktemp("packed")
    write(folder)
    return folder, (folder / FILE).read_bytes(), (folder / INDEX).read_bytes()
