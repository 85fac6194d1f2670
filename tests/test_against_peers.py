"""benchmarks/against_peers.py, with another of our methods in a peer's place, which tests do not install."""

import argparse
from functools import partial

import torch
from transformers import AutoTokenizer

from benchmarks import against_peers as benchmark
from optimum_neuronal.demo.run import TINY_MODEL


def test_a_row_of_the_table(monkeypatch):
    text = str(TINY_MODEL / "heldout.txt")
    args = argparse.Namespace(model=TINY_MODEL, sparsity=0.5, evaluate=text, window=32, windows=2)
    tokenizer, ids = AutoTokenizer.from_pretrained(TINY_MODEL), torch.arange(4 * 16).view(4, 16)

    wanda, other = (partial(benchmark.uniform, saliency=saliency) for saliency in ("wanda", "magnitude"))
    rows = []
    for peer in (wanda, other):
        monkeypatch.setitem(benchmark.METHODS, "wanda", (wanda, peer))
        rows.append(benchmark.compare("wanda", args, tokenizer, ids))
    same, changed = rows
    assert [len(row) for row in rows] == [len(benchmark.HEADER)] * 2
    assert same[4] == same[5] == changed[4] != changed[5] and same[6] == "0.00%"
    assert 0 < float(changed[6].rstrip("%")) < 50


def test_the_share_of_zeros_elsewhere():
    own, other = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert benchmark.share_elsewhere({"a": own, "b": own}, {"a": other, "b": own}) == 2 / 8
