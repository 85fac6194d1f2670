import sys
import xml.etree.ElementTree as ElementTree
from io import BytesIO

import matplotlib
import pytest
from PIL import Image

from optimum_neuronal.common.figure_style import (
    check_matplotlib,
    new_figure,
    show_percent,
)


def texts(files):
    """Return all text of a figure's SVG."""
    found = ElementTree.fromstring(files[".svg"]).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in found]


def draw():
    with new_figure(2, "A title") as (figure, files):
        axes = figure.subplots()
        axes.plot([0, 1], [0.0, 0.625])
        axes.set_yticks([0, 0.625])
        show_percent(axes.yaxis)
    return files


def test_equal_data_give_equal_files_whatever_the_users_settings():
    files = draw()
    assert {"0 %", "62.5 %", "A title"} <= set(texts(files))
    with Image.open(BytesIO(files[".png"])) as image:
        assert image.format == "PNG" and image.width == 1200
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        settings = matplotlib.rcParams.copy()
        assert draw() == files
        assert matplotlib.rcParams.copy() == settings


def test_matplotlib_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for call in (check_matplotlib, draw):
        with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[report\]"):
            call()
