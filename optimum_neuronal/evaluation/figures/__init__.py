"""One file for each figure, and the canvas that all of them are drawn on."""
