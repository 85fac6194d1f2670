"""A process in which vLLM serves a checkpoint over HTTP."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError


SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
STARTS_WITHIN = 300  # seconds


@dataclass(frozen=True)
class Server:
    """A server that has started: its address, and the number of its process."""

    address: str
    pid: int

    def complete(self, prompt: str | list[int], tokens: int = 32) -> tuple[list[int], list[int]]:
        """Return a prompt's tokens, and the greedy ones that follow."""
        asked = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            json.dumps({**asked, "return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=STARTS_WITHIN) as answer:
            (choice,) = json.load(answer)["choices"]
        return choice["prompt_token_ids"], choice["token_ids"]


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Server]:
    """Serve a checkpoint over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *place, *options]
    with log.open("w") as output:
        server = subprocess.Popen(command, env={**SETTINGS, **os.environ}, stdout=output, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(server, address, log)
            yield Server(address, server.pid)
        finally:
            server.terminate()
            server.wait(timeout=60)


def _wait(server: subprocess.Popen, address: str, log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
