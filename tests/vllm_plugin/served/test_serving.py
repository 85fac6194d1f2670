"""The OpenAI-compatible server with a packed checkpoint, its graphs compiled by Inductor."""

from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM

from .checkpoints import agreeing, save
from .processes import serving


SHAPE = ("--dtype", "float32", "--max-model-len", "256")
OPTIONS = ("--load-format", "optimum_neuronal", *SHAPE)
PROMPTS = [
    "The if statement is used for", "Functions", "A list comprehension consists of", "The following", "Python is",
    "An iterator returns", "A class defines", "Modules can",
]  # fmt: skip


def test_concurrent_requests_and_a_restart(tmp_path):
    """Eight requests at once get transformers' tokens, and one alone gets the same after a restart."""
    folder, alone = save("packed", tmp_path / "model"), []
    for start in range(2):
        with serving(folder, tmp_path / f"log{start}", *OPTIONS) as server:
            alone.append(server.complete(PROMPTS[0]))
            if not start:
                with ThreadPoolExecutor(len(PROMPTS)) as pool:
                    answers = list(pool.map(server.complete, PROMPTS))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same, tokens = agreeing(model, *zip(*answers))
    assert tokens == 256 and same >= 254
    assert alone[0] == alone[1]


def test_a_dense_checkpoint_packed_as_it_arrives(tmp_path):
    """Its graphs are compiled too, in a process that has read no packed file."""
    folder = save("dense", tmp_path / "model")
    with serving(folder, tmp_path / "log", "--quantization", "optimum_neuronal", *SHAPE) as server:
        answer = server.complete(PROMPTS[0])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same, tokens = agreeing(model, *zip(answer))
    assert tokens == 32 and same >= 31
