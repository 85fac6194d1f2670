import os

import pytest
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner, compare, evaluate_perplexity
from optimum_neuronal.checkpoint.loading import load_checkpoint


def test_a_model_of_a_directory(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    assert type(load_checkpoint(tmp_path)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "use",
    [
        load_checkpoint,
        lambda path: evaluate_perplexity(str(path), None, "wikitext2"),
        lambda path: compare(str(path), dataset=[[1, 2]], evaluate={"own": [[1, 2]]}),
        lambda path: NeuronALPruner.from_pretrained(path, config=NeuronALConfig(0.5)),
    ],
)
def test_a_pipe_in_the_place_of_weights_is_refused_and_nobody_waits(tmp_path, use):
    """In one of several files: transformers would open it."""
    make_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises((ValueError, OSError), match=shard.name):
        use(tmp_path)
