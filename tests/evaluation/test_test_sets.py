import pytest
import torch

from optimum_neuronal.evaluation.test_sets import name_test_sets


def test_every_test_set_keeps_a_name_of_its_own(tmp_path):
    files = [tmp_path / name for name in ("a/test.txt", "b/test.txt", "c/test.jsonl", "test.txt (2)")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("text")
    ids = torch.zeros(1, 2, dtype=torch.int64)
    entries = [str(files[0]), files[1], f"{files[2]}:code", str(files[3]), "wikitext2", ids, ["text"], "wikitext2"]
    named = name_test_sets(entry for entry in entries)
    assert list(named) == [
        "test.txt", "test.txt (2)", "test.jsonl:code", "test.txt (2) (2)", "wikitext2", "test 6", "test 7", "wikitext2 (2)"
    ]  # fmt: skip
    assert all(found is entry for found, entry in zip(named.values(), entries, strict=True))
    assert name_test_sets({"mine": ids}) == {"mine": ids} and name_test_sets(()) == {}


@pytest.mark.parametrize("evaluate", ["wikitext2", 5, None])
def test_one_name_is_no_list(evaluate):
    with pytest.raises(TypeError, match=r"expected a list of test sets, such as \['wikitext2'\]"):
        name_test_sets(evaluate)
