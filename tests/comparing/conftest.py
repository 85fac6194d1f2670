"""A small comparison, the same for all tests of comparing; figures without pixels."""

from itertools import islice

import pytest
from matplotlib.figure import Figure

from optimum_neuronal.saliency import alps


SMALL = {"num_samples": 6, "num_alignment_samples": 2}


@pytest.fixture
def others(ids):
    return {"dataset": ids[:6], "evaluate": {"test": ids[6:]}, "sparsities": [0.5], **SMALL}


@pytest.fixture
def quick_alps(monkeypatch):
    """ALPS looks for its supports in a few iterations instead of many."""
    original = alps.find_support
    monkeypatch.setattr(alps, "find_support", lambda *args: original(*args[:-1], islice(args[-1], 6)))


@pytest.fixture(autouse=True)
def no_pixels(monkeypatch):
    """Only the SVG of a figure is drawn; common/test_figure_style.py draws the PNG too."""
    original = Figure.savefig

    def savefig(figure, file, format, **options):
        return file.write(b"\x89PNG\r\n") if format == "png" else original(figure, file, format=format, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
