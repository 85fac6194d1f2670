import ast
import re
import shlex
import time

import pytest
from huggingface_hub import ModelCard
from sparse_checkpoints import save_pruned

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.checkpoint.model_card import make_card, with_format
from optimum_neuronal.inference.sparsify import sparsify
from optimum_neuronal.runtime.quantities import format_bytes


@pytest.fixture
def pruned(tmp_path):
    return save_pruned(tmp_path / "llama-70", ignore=[r"layers\.0\..*q_proj"])


def test_the_code_on_the_card_is_the_config(pruned):
    """It is run, but for the model and the prune."""
    pruner, model = pruned
    code = re.findall(r"```python\n(.*?)```", str(make_card(model, pruner.report, "me/llama-70")), re.S)[-1]
    made = {}
    exec(code.partition("pruner = ")[0].partition("model = ")[0] + "config = " + code[code.index("NeuronALConfig(\n") :]
         .partition("\n)\n")[0], made)  # fmt: skip
    assert made["config"] == NeuronALConfig.from_dict(pruner.report.config)
    assert "num_samples" not in code, "no calibration data were needed"


def test_metadata(pruned, tmp_path):
    pruner, model = pruned
    data = make_card(model, pruner.report, "me/llama-70").data
    assert data.base_model is None and "base_model_relation" not in data.to_dict(), "made from a config"
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    for origin, told in (("meta/llama", "meta/llama"), (str(tmp_path), None), ("a/b/c", None)):
        model.config._name_or_path = origin
        card = make_card(model, pruner.report, "me/llama-70")
        assert card.data.base_model == told and ("huggingface.co" in str(card)) == (told is not None)
        assert str(tmp_path) not in str(card), "no folder of this machine is published"
        assert card.data.to_dict().get("base_model_relation") == ("quantized" if told else None)
        assert ModelCard(str(card)).data.to_dict() == card.data.to_dict(), "it is valid YAML"


def test_how_to_load_it_depends_on_the_format(pruned):
    pruner, model = pruned
    dense, packed = (str(make_card(model, pruner.report, "me/llama-70", format)) for format in ("dense", "packed"))
    assert "import optimum_neuronal\nfrom transformers" in packed and "import optimum_neuronal\n" not in dense
    assert "optimum-cli neuronal convert llama-70 --format dense --output llama-70-dense" in packed
    assert with_format(dense, "packed") == packed and with_format(packed, "dense") == dense
    assert with_format(dense, "dense") == dense and with_format("# Mine\n", "packed") == "# Mine\n"


def test_perplexities_are_told_if_they_were_measured(pruned):
    pruner, model = pruned
    assert "Perplexity" not in str(make_card(model, pruner.report, "llama-70"))
    pruner.report.evaluation = {"wikitext2": {"dense": 12.345, "pruned": 23.456}, "mine": {"pruned": 7}}
    card = str(make_card(model, pruner.report, "llama-70"))
    assert re.search(r"^wikitext2 +1[2]\.3[45] +23\.46$", card, re.M) and re.search(r"^mine +- +7\.00$", card, re.M)
    assert "perplexity, wikitext2" in str(pruner.report)


def test_it_tells_the_memory_of_packed_weights(pruned):
    pruner, model = pruned
    card = str(make_card(model, pruner.report, "llama-70"))
    found = re.search(r"take\n(.*) of memory instead of (.*), the whole model (.*) instead of (.*)\.\n", card).groups()
    dense = model.get_memory_footprint()
    sparsify(model)
    packed = model.get_memory_footprint()
    summary = model.packing
    told = (summary.packed_bytes, summary.dense_bytes, packed, dense)
    assert found == tuple(format_bytes(size) for size in told)


@pytest.mark.parametrize("title", ["my model", "it's; rm -rf ~ $(x) {0}", 'a"b', "Modèle"])
def test_a_title_is_quoted_for_python_and_for_the_shell(pruned, title):
    pruner, model = pruned
    dense, packed = (str(make_card(model, pruner.report, title, format)) for format in ("dense", "packed"))
    (line,) = re.findall(r"^optimum-cli .*$", packed, re.M)
    assert shlex.split(line)[3:] == [title, "--format", "dense", "--output", f"{title}-dense"]
    (code,) = re.findall(r"^model = AutoModelForCausalLM.from_pretrained\((.*)\)$", packed, re.M)[:1]
    assert ast.literal_eval(code) == title
    assert with_format(dense, "packed") == packed and with_format(packed, "dense") == dense


def test_a_title_is_one_line_of_text(pruned):
    pruner, model = pruned
    card = str(make_card(model, pruner.report, "a\n\x1b[2J\udcff"))
    assert r"# a\n\x1b[2J\udcff" in card and card.encode("utf-8")


def test_a_long_card_of_another_make_takes_no_time():
    card = "# Mine\n" + "\n## Use\n\n" * 200_000
    start = time.perf_counter()
    assert with_format(card, "packed") == card
    assert time.perf_counter() - start < 1
