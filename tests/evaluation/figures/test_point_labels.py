import itertools

import numpy as np
import pytest

from optimum_neuronal.evaluation.figures.canvas import new_figure
from optimum_neuronal.evaluation.figures.point_labels import label_points


@pytest.mark.parametrize("seed", range(2))
def test_names_cover_neither_points_nor_names(seed, tmp_path):
    """As many as three dozen, scattered at random over the panel."""
    positions = np.random.default_rng(seed).uniform(1, 1.2, (36, 2))
    with new_figure(tmp_path / "figure", 5) as (figure, _):
        panel = figure.subplots()
        for index, (x, y) in enumerate(positions):
            panel.plot([x], [y], "o", ms=9, label=f"method {index}")
        panel.margins(0.14)
        label_points(figure, [panel])
        renderer = figure.canvas.get_renderer()
        boxes = [text.get_bbox_patch() or text for text in panel.texts]
        boxes = [super(type(text), text).get_window_extent(renderer) for text in boxes]  # less the leading line
        points = panel.transData.transform(positions)
        inside = panel.get_window_extent(renderer).padded(3)
    assert len(boxes) == 36
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert not any(box.contains(*point) for point in points)
        assert inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
