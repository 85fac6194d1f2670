"""One file for each figure, and the canvas that all of them are drawn on.

Callers find the figures by name in `evaluation.plots`. Figures know numbers and names alone: no model, no comparison;
matplotlib is imported when the first one is drawn.
"""
