"""Train one small Llama up a ladder: checkpoints at 1, 3, 10, 16, 30, 100 and 300 training tokens per parameter.

    python -m benchmarks.ladder prepare --state DIR           read the text, train the tokenizer, make the model
    python -m benchmarks.ladder train --state DIR --until 100 climb; the same command resumes after any interruption
    python -m benchmarks.ladder export --state DIR --rung 10 --output MODEL

Without --rung, `export` writes the main run as it is. `prepare --start MODEL` makes such a model the beginning of a run
on another machine, which takes its tokenizer and its step, and warms up once more.

benchmarks/rungs has the last finished rung in bf16, from which a run may start too. benchmarks/ladder_text.py says how DIR gets
its text. The learning rate is constant after the warm-up. For each rung a branch leaves the main run at nine tenths of
its tokens and lets the rate fall to zero; the main run goes on from where the branch began. One thread trains. Every ten
minutes, and when the process is told to stop, the state is written to a new file that then takes the old one's place.
The order of the text follows from the step alone, so a resumed run computes the same weights, bit by bit, as one that
was never stopped, on the same kind of processor.
"""

import argparse
import fcntl
import json
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from benchmarks import ladder_text
from benchmarks.ladder_run import Plan, Training
from optimum_neuronal import evaluate_perplexity


END = "<|endoftext|>"
SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6}
SHAPE |= {"num_key_value_heads": 3, "vocab_size": 4096, "max_position_embeddings": 512, "tie_word_embeddings": True}
SHAPE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
KINDS = ("english", "languages", "code")


def prepare(state: Path, start: Path | None = None) -> None:
    """Write the tokens, the tokenizer, the model at its start, the texts kept apart and the list of sources."""
    parts = ladder_text.read_all(state / "packages")
    if start is None:
        make_model(state / "model", [document.text for document in parts["train"]])
    else:
        transformers.AutoTokenizer.from_pretrained(start).save_pretrained(state / "model")
        transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).save_pretrained(state / "model")
    bpe, tokens = tokenizers.Tokenizer.from_file(str(state / "model" / "tokenizer.json")), {}
    with (state / "tokens.bin").open("wb") as file:
        for document in parts["train"]:
            ids = np.array([*bpe.encode(document.text).ids, bpe.token_to_id(END)], dtype="<u2")
            tokens[document.kind] = tokens.get(document.kind, 0) + len(ids)
            ids.tofile(file)
    slices = [(d.kind, d.text[len(d.text) // 3 :][:4000]) for d in parts["heldout"]]  # of every file, for variety
    calibration = [d.text[len(d.text) // 3 :][:4000] for d in parts["calibration"]]
    kept = {"heldout": [text for _, text in slices], "calibration": calibration}
    kept |= {f"heldout-{kind}": [text for own, text in slices if own == kind] for kind in KINDS}
    for name, pieces in kept.items():
        (state / f"{name}.txt").write_text("\n\n".join(pieces)[:160_000], encoding="utf-8")
    sources = {"packages": ladder_text.versions(state / "packages"), "training tokens": tokens}
    (state / "sources.json").write_text(json.dumps(sources, indent=2) + "\n", encoding="utf-8")


def make_model(folder: Path, texts: list[str]) -> None:
    """Write the tokenizer, trained on the texts, and the untrained model."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=SHAPE["vocab_size"], special_tokens=[END], show_progress=False)
    names = {"bos_token": END, "eos_token": END, "pad_token": END}
    names["model_max_length"] = SHAPE["max_position_embeddings"]
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def train(state: Path, until: int, plan: Plan = Plan(), stop: Callable[[], bool] = lambda: False) -> bool:  # noqa: B008
    """Climb up to the rung ``until``, from wherever the files in ``state`` are; return False if stopped before."""
    run, main = Training(state, plan), state / "main.safetensors"
    for rung in (rung for rung in plan.rungs if rung <= until):
        done, branch = state / f"rung-{rung}.safetensors", state / f"rung-{rung}.branch.safetensors"
        if done.exists() or run.began > run.leaves(rung):  # the run goes on from a model that is past it
            continue
        if not branch.exists():
            if main.exists():
                run.load(main)
            if not run.advance(main, rung, stop):
                return False
            run.save(branch)
        run.load(branch)
        if not run.advance(branch, rung, stop, decay=True):
            return False
        branch.replace(done)
    return True


def train_until_told(state: Path, until: int) -> bool:
    """Train, and write the state when the process is asked to end."""
    told = threading.Event()
    before = {number: signal.signal(number, lambda *_: told.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return train(state, until, stop=told.is_set)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def export(state: Path, rung: int | None, output: Path) -> None:
    """Write a rung, or the main run, as a checkpoint in bf16 with its tokenizer and texts; print its perplexities."""
    run = Training(state, Plan())
    run.load(state / ("main.safetensors" if rung is None else f"rung-{rung}.safetensors"))
    run.model.config.training_steps = run.step
    tokenizer = transformers.AutoTokenizer.from_pretrained(state / "model")
    run.model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    for name in ("calibration.txt", "heldout.txt", *(f"heldout-{kind}.txt" for kind in KINDS), "sources.json"):
        shutil.copy(state / name, output / name)
    model = run.model.float().eval()
    for kind in KINDS:
        text = str(output / f"heldout-{kind}.txt")
        print(f"{kind}: perplexity {evaluate_perplexity(model, tokenizer, text, Plan.length, max_windows=96):.3f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("packages", help="print the names of the Debian packages")
    for name in ("prepare", "train", "export"):
        command = commands.add_parser(name)
        command.add_argument("--state", type=Path, required=True, help="the folder of the run")
        if name == "prepare":
            command.add_argument("--start", type=Path, help="an exported main run to go on from")
        if name == "train":
            command.add_argument("--until", type=int, default=100, help="the last rung (default: 100)")
        if name == "export":
            command.add_argument("--rung", type=int, help="tokens per parameter (default: the main run as it is)")
            command.add_argument("--output", type=Path, required=True, help="directory to write")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.command == "packages":
        print(*ladder_text.package_names())
    elif args.command == "prepare":
        prepare(args.state, args.start)
    elif args.command == "export":
        export(args.state, args.rung, args.output)
    else:
        with (args.state / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                parser.error(f"another process trains in {args.state}")
            return 0 if train_until_told(args.state, args.until) else 1
    return 0


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()  # the log is read as a file
    raise SystemExit(main())
