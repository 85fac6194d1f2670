"""benchmarks/against_peers.py, with another of our methods in a peer's place, which tests do not install."""

import argparse
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import against_peers as benchmark
from optimum_neuronal.demo.run import TINY_MODEL


WANDA, MAGNITUDE = (partial(benchmark.uniform, saliency=saliency) for saliency in ("wanda", "magnitude"))


@pytest.fixture
def row_against(monkeypatch):
    """Return the row of our Wanda beside a peer."""

    def row_against(peer):
        monkeypatch.setitem(benchmark.METHODS, "wanda", (WANDA, peer))
        text = str(TINY_MODEL / "heldout.txt")
        args = argparse.Namespace(model=TINY_MODEL, dtype="float32", sparsity=0.5, evaluate=text, window=32, windows=2)
        tokenizer, ids = AutoTokenizer.from_pretrained(TINY_MODEL), torch.arange(4 * 16).view(4, 16)
        return benchmark.compare("wanda", args, tokenizer, ids)

    return row_against


def test_a_row_of_the_table(row_against):
    rows = [row_against(peer) for peer in (WANDA, MAGNITUDE)]
    same, changed = rows
    assert [len(row) for row in rows] == [len(benchmark.HEADER)] * 2
    assert same[4] == same[5] == changed[4] != changed[5] and same[6] == "0.00%"
    assert 0 < float(changed[6].rstrip("%")) < 50


class WandaInTheirPlace:
    """Has the methods of the class of ALPS' authors, and prunes by Wanda's score."""

    def __init__(self, layer, nsamples, seqlen):
        self.layer, self.norms = layer, torch.zeros(layer.in_features)

    def add_batch(self, inputs, outputs):
        self.norms += inputs.flatten(0, 1).square().sum(dim=0)

    def ALPS_admm(self, sp):
        scores = self.layer.weight.abs() * self.norms.sqrt()
        least = scores.topk(int(sp * scores.shape[1]), dim=1, largest=False).indices
        self.layer.weight.scatter_(1, least, 0)


def test_the_class_of_alps_authors_is_driven_block_by_block(row_against, monkeypatch):
    """It receives what our own prune receives: with Wanda's score, the same weights are zero."""
    monkeypatch.setitem(sys.modules, "alps", SimpleNamespace(ALPS_prune=WandaInTheirPlace))
    row = row_against(benchmark.their_alps)
    assert row[4] == row[5] and row[6] == "0.00%"
