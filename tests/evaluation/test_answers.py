import pytest
import torch
from conftest import make_model
from packed_models import make_zeroed

from optimum_neuronal import compare_answers, sparsify
from optimum_neuronal.evaluation.answers import DenseAnswers, answer, built_in_prompts, encode


CHAT = "{% for m in messages %}w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"


def by_hand(dense, sparse, tokenizer, prompt, length):
    """Sums over the dense model's greedy tokens: KL divergence, and equal tokens."""
    ids, divergence, same = tokenizer(prompt)["input_ids"], 0.0, 0
    for _ in range(length):
        with torch.no_grad():
            p, q = (model(torch.tensor([ids])).logits[0, -1].double().softmax(-1) for model in (dense, sparse))
        divergence += (p * (p / q).log()).sum().item()
        same += int(p.argmax() == q.argmax())
        ids.append(int(p.argmax()))
    return divergence, same


def test_divergence_and_agreement_by_hand(tokenizer):
    dense, sparse = make_model("llama", vocab_size=256), make_zeroed("llama", vocab_size=256)
    for model in (dense, sparse):
        model.generation_config.eos_token_id = None
    prompts = ["w1 w2 w3", "w9", "w5 w4"]
    found = compare_answers(sparse, dense, tokenizer, prompts, max_new_tokens=5)
    sums = [by_hand(dense, sparse, tokenizer, prompt, 5) for prompt in prompts]
    assert found.kl == pytest.approx(sum(one for one, _ in sums) / 15, rel=1e-3) and found.kl > 1e-4
    assert found.agreement == sum(same for _, same in sums) / 15 and found.tokens == 15
    assert [one["prompt"] for one in found.examples] == prompts
    assert found.examples[1]["dense"] == answer(dense, tokenizer, "w9", 5) and found.examples[1]["dense"] in str(found)
    assert found.examples[1]["sparse"] == answer(sparse, tokenizer, "w9", 5)
    packed = compare_answers(sparsify(sparse), dense, tokenizer, prompts, max_new_tokens=5)
    assert packed.kl == pytest.approx(found.kl, rel=1e-3)


def test_a_dense_model_agrees_with_itself(tokenizer):
    model = make_model("gpt2", vocab_size=256)
    training = model.training
    found = compare_answers(model, model, tokenizer, max_new_tokens=2)
    assert found.agreement == 1 and abs(found.kl) < 1e-3 and found.prompts == 48 and model.training is training
    assert all(one["dense"] == one["sparse"] for one in found.examples) and len(found.examples) == 3


def test_prompts(tokenizer):
    """With a chat template, built-in prompts are user turns; without, they are texts to continue."""
    assert built_in_prompts(tokenizer)[0].startswith("Question: ") and len(set(built_in_prompts(tokenizer))) == 48
    tokenizer.chat_template = CHAT
    assert not built_in_prompts(tokenizer)[0].startswith("Question: ")
    turns = [{"role": "user", "content": f"w{i}"} for i in (3, 4)]
    assert encode(tokenizer, turns).tolist() == [1, 3, 1, 4, 2] and encode(tokenizer, "w3").tolist() == [1, 3, 2]


def test_mistakes(tokenizer):
    dense = make_model("llama", vocab_size=256)
    with pytest.raises(ValueError, match="holds conversations, but the tokenizer has no chat template"):
        encode(tokenizer, [{"role": "user", "content": "w1"}])
    with pytest.raises(ValueError, match="There are no prompts"):
        compare_answers(dense, dense, tokenizer, [])
    dense.generation_config.update(num_beams=2, num_return_sequences=2, repetition_penalty=9.0)
    assert answer(dense, tokenizer, "w1 w2", 5) == answer(make_model("llama", vocab_size=256), tokenizer, "w1 w2", 5)
    assert compare_answers(dense, dense, tokenizer, ["w1 " * 61]).tokens <= 64 - 61, "what its positions allow"
    with pytest.raises(ValueError, match="first token of their answers, up to 65 tokens do not fit"):
        compare_answers(dense, dense, tokenizer, ["w1", "w1 " * 64])
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        compare_answers(dense, dense, tokenizer, max_new_tokens=0)
    with pytest.raises(ValueError, match="predicts 300 tokens, the dense model 256"):
        DenseAnswers(dense, tokenizer, ["w1"], 1).compare(make_model("llama", vocab_size=300))
    tokenizer.chat_template = "{{ raise_exception('Where is the system message?') }}"
    with pytest.raises(ValueError, match="does not accept a prompt. .*Where is the system message"):
        answer(dense, tokenizer, "Once")
