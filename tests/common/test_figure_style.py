import sys

import matplotlib
import pytest
from PIL import Image

from optimum_neuronal.common.figure_style import check_matplotlib, new_figure


def draw(path):
    with new_figure(path, 2, "A title") as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0.0, 0.625])
    return path.read_bytes()


def test_equal_data_give_equal_files_whatever_the_users_settings(tmp_path):
    content = draw(tmp_path / "new" / "one.png")
    with Image.open(tmp_path / "new" / "one.png") as image:
        assert image.format == "PNG" and 1100 < image.width < 1300
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        settings = matplotlib.rcParams.copy()
        assert draw(tmp_path / "two.png") == content
        assert matplotlib.rcParams.copy() == settings


def test_matplotlib_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for call in (check_matplotlib, lambda: draw(tmp_path / "a.png")):
        with pytest.raises(ImportError, match=r"pip install 'optimum-neuronal\[report\]'"):
            call()
