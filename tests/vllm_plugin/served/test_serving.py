"""The OpenAI-compatible server with a packed checkpoint, its graphs compiled by Inductor."""

from concurrent.futures import ThreadPoolExecutor

from .checkpoints import save
from .processes import complete, serving


PROMPTS = [
    "The if statement is used for", "Functions", "A list comprehension consists of", "The following", "Python is",
    "An iterator returns", "A class defines", "Modules can",
]  # fmt: skip


def test_concurrent_requests_and_a_restart(tmp_path):
    """Eight requests at once get what each gets alone, and the same after a restart."""
    folder, answers = save("quantised-8-bit-head", tmp_path / "model"), []
    for start in range(2):
        with serving(folder, tmp_path / f"log{start}", "--load-format", "optimum_neuronal") as address:
            if not start:
                answers.append([complete(address, prompt) for prompt in PROMPTS])
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                answers.append(list(pool.map(lambda prompt: complete(address, prompt), PROMPTS)))
    assert len(set(answers[0])) > 1 and answers[1] == answers[0] and answers[2] == answers[0]
