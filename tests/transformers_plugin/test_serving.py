import json
from urllib.request import Request, urlopen

import pytest
import torch
from few_bits import make_few_bits
from packed_models import make_zeroed
from profiles import at_night
from sparse_checkpoints import save_pruned
from transformers import ContinuousBatchingConfig, GenerationConfig

from optimum_neuronal import save_pretrained, sparsify
from optimum_neuronal.compat import serving as programs
from optimum_neuronal.model.packed_modules import packed_modules
from optimum_neuronal.transformers_plugin import serving


PROMPTS = [[3, 5, 7], [11, 2, 9, 4, 8], [1, 6]]
GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=62)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_sparse_model_is_loaded_with_packed_weights(tmp_path, format):
    save_pruned(tmp_path, format=format)
    assert (
        len(list(packed_modules(serving.load_packed(str(tmp_path), "main", dtype="auto")))) == 21
    )  # seven in each of three blocks


def test_any_other_model_is_left_to_transformers(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    assert serving.load_packed(str(tmp_path), "main") is None


def test_chat_starts_a_server_unless_it_is_given_one(monkeypatch):
    calls = []
    monkeypatch.setattr(programs, "run_transformers", lambda *words: calls.append(words))

    class Server:
        def __init__(self, model):
            calls.append(("server", model))

        __enter__, __exit__ = lambda self: "http://here", lambda self, *_: calls.append(("stopped",))

    monkeypatch.setattr(serving, "running_server", Server)
    serving.chat("model", "http://there:1", "do_sample=False")
    assert calls == [("chat", "model", "http://there:1", "do_sample=False")]
    del calls[:]
    serving.chat("model", "do_sample=False")
    assert calls == [("server", "model"), ("chat", "model", "http://here", "do_sample=False"), ("stopped",)]


@at_night
@pytest.mark.parametrize("make", [make_few_bits, lambda: sparsify(make_zeroed())], ids=["few bits", "sparse"])
def test_continuous_batching_gives_what_each_prompt_gives_alone(make):
    model = make()
    alone = [model.generate(torch.tensor([ids]), generation_config=GREEDY)[0, len(ids) :].tolist() for ids in PROMPTS]
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    together = model.generate_batch(PROMPTS, generation_config=GREEDY, continuous_batching_config=small)
    assert sorted(output.generated_tokens for output in together.values()) == sorted(alone)


@at_night
@pytest.mark.parametrize(
    "options", [{}, {"continuous_batching": True, "cb_num_blocks": 16}], ids=["one by one", "batches"]
)
def test_requests_over_http_are_answered(tokenizer, tmp_path, options):
    pytest.importorskip("fastapi", reason="needs the extra serve")
    model = make_few_bits(vocab_size=256, max_position_embeddings=64)
    save_pretrained(model, tmp_path, format="packed")
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("w3 w5 w7", return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0, 3:])
    question = {"model": str(tmp_path), "prompt": "w3 w5 w7", "max_tokens": 4, "temperature": 0}
    with serving.running_server(str(tmp_path), **options) as url:
        body = Request(f"{url}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"})
        answer = json.load(urlopen(body, timeout=60))
    assert answer["choices"][0]["text"] == expected and answer["usage"]["completion_tokens"] == 4
