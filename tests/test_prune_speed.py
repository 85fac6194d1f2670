"""benchmarks/prune_speed.py: its table."""

from benchmarks import prune_speed
from optimum_neuronal.demo.run import TINY_MODEL


BLOCKS, SAMPLES = 8, 4


def test_the_table_has_the_forwards_and_the_seconds_of_each_stage(monkeypatch, capsys):
    sizes = ["--num-samples", SAMPLES, "--seq-length", 32, "--num-alignment-samples", 2]
    text = ["--dataset", TINY_MODEL / "calibration.txt"]
    methods = ["wanda", "wanda+neuronal:block_lambdas=[0.1,0.2]", "wanda+owl", "alps:iterations=9"]
    monkeypatch.setattr(prune_speed, "ROWS", 128)
    monkeypatch.setattr("sys.argv", ["prune_speed", *map(str, [TINY_MODEL, *methods, *text, *sizes])])
    prune_speed.main()
    _, _, *lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == methods
    counts = {row[0]: int(row[1].replace(",", "")) for row in rows}
    final = (2 * BLOCKS - 1) * SAMPLES  # the output of the last block is not needed
    assert counts["wanda"] == final + 2 * BLOCKS, "two passes of the check"
    assert counts["wanda+owl"] == counts["wanda"] + SAMPLES * BLOCKS
    solver, every, share = (float(cell) for cell in rows[3][-3:])
    assert 0 < solver < every
    assert 0 < share < 1
