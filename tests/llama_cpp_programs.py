"""Stand-ins for llama.cpp's programs, which print what the real ones would."""

import json
from shlex import quote


RESULTS = [
    {"n_prompt": 9, "n_gen": 0, "samples_ts": [80.0, 100.0, 90.0]},
    {"n_prompt": 0, "n_gen": 4, "samples_ts": [10.0, 12.0, 30.0]},
]
FACTS = {"build_number": 7, "build_commit": "abc", "model_type": "llama 1B Q4_0", "model_size": 1000}
BATCHES = [{"pl": 2, "tg": 4, "speed_tg": 20.0}, {"pl": 3, "tg": 4, "speed_tg": 33.0}]
BATCHES += [
    {"pl": 2, "tg": 4, "speed_tg": 24.0},
    {"pl": 3, "tg": 4, "speed_tg": 31.0},
    {"pl": 2, "tg": 1, "speed_tg": 9.0},
]


def write_program(folder, name, prints, status=0, error=""):
    """A stand-in that prints a text and writes its arguments beside itself."""
    program = folder / name
    program.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {quote(str(program))}.called\n"
        f"printf %s {quote(prints)}\nprintf %s {quote(error)} >&2\nexit {status}\n"
    )
    program.chmod(0o755)


def write_programs(folder):
    """Stand-ins of the two that measure, in a new folder."""
    folder.mkdir()
    write_program(folder, "llama-bench", json.dumps([result | FACTS for result in RESULTS]))
    write_program(folder, "llama-batched-bench", "\n".join(["a warning", *map(json.dumps, BATCHES), ""]))
    return folder


def flags_of(folder, name):
    """The flags that a stand-in was called with, by name."""
    called = (folder / f"{name}.called").read_text().splitlines()
    return dict(zip(called[::2], called[1::2]))
