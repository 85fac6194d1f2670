import pytest
from transformers.utils import logging

import optimum_neuronal.engine.progress as module
from optimum_neuronal.engine.progress import Progress, Stage


class Bar:
    def __init__(self, items=None, **options):
        self.items, self.options, self.n, self.told, self.closed = items, options, 0, [], False

    def __iter__(self):
        return iter(self.items)

    def update(self, work):
        self.n += work

    def set_description(self, text):
        self.told.append(text)

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    made = []

    def tqdm(*args, **options):
        made.append(Bar(*args, **options))
        return made[-1]

    monkeypatch.setattr(module.logging, "tqdm", tqdm)
    return made


STAGES = {"Check": Stage(1, 10), "Search": Stage(4, 40), "Pruning": Stage(1, 50)}


def visited(progress, label, start=0):
    return list(progress.over(range(start, 2), label))


def test_one_line_for_the_whole_prune(bars):
    """Its own line, and a bar for every pass; the check is over when the search begins."""
    seen = []
    with Progress(STAGES) as progress:
        for label in ("Search", "Search", "Pruning"):
            assert visited(progress, label) == [0, 1]
            seen.append(bars[0].n)
    assert seen == [20, 30, 100] and bars[0].options["total"] == 100 and bars[0].closed
    assert bars[0].told == ["Pruning, Search, pass 1 of 4", "Pruning, Search, pass 2 of 4", "Pruning"]
    assert [bar.options["desc"] for bar in bars[1:]] == ["Search", "Search", "Pruning"]


def test_a_pass_goes_on_behind_one_that_it_needed(bars):
    """The dense model's pass is made within the first of the search."""
    with Progress({"Dense": Stage(1, 10), **STAGES}) as progress:
        blocks = progress.over(range(2), "Search")
        next(blocks)
        visited(progress, "Dense")
        assert list(blocks) == [1]
    search = "Pruning, Search, pass 1 of 4"
    assert bars[0].told == [search, "Pruning, Dense", search]


def test_more_passes_than_planned_do_not_go_beyond_their_stage(bars):
    with Progress(STAGES) as progress:
        for _ in range(6):
            visited(progress, "Search")
        assert bars[0].n == 50


def test_a_pass_that_goes_on_in_the_middle(bars):
    with Progress(STAGES) as progress:
        assert visited(progress, "Pruning", start=1) == [1]
        assert bars[0].n == 100


def test_passes_that_nobody_planned_have_their_bar(bars):
    with Progress(STAGES) as progress:
        visited(progress, "Something else")
        assert bars[0].n == 0 and bars[1].options["desc"] == "Something else"


@pytest.mark.parametrize("quiet, label", [(True, "Search"), (False, None)])
def test_nothing_is_shown(bars, quiet, label):
    with Progress(STAGES if quiet else {}, quiet) as progress:
        assert visited(progress, label) == [0, 1]
    assert not bars


def test_whoever_wants_no_bars_of_transformers_has_none():
    logging.disable_progress_bar()
    try:
        with Progress(STAGES) as progress:
            assert visited(progress, "Search") == [0, 1]
    finally:
        logging.enable_progress_bar()


def test_an_error_closes_the_line(bars):
    with pytest.raises(ConnectionError), Progress(STAGES):
        raise ConnectionError
    assert bars[0].closed
