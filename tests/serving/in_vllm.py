"""What vLLM generates from packed checkpoints, for tests: in processes of their own (engine.py)."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from compared import PROMPTS, TOKENS, Answers

needed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@functools.cache
def parent() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, str(Path(__file__).with_name("engine.py"))]
    process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def ask(**asked: Any) -> int:
    process = parent()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def served(directory: Path, folder: Path, lora: Path | None = None, **options: Any) -> Answers:
    """What vLLM generates; what it logs is in "log" beside it.

    images: for each of PROMPTS that comes with one the file of an image, as one of the options.
    """
    out, log = folder / "out.json", folder / "log"
    environment = options.pop("environment", {})
    asked = {"prompts": options.pop("prompts", PROMPTS), "images": [str(path) for path in options.pop("images", [])]}
    asked |= {"tokens": TOKENS, "options": options, "environment": environment}
    code = ask(model=str(directory), out=str(out), log=str(log), lora=None if lora is None else str(lora), **asked)
    assert code == 0, log.read_text()[-6000:]
    return json.loads(out.read_text())


def in_rounds(directory: Path, folder: Path, rounds: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """What vLLM generates for one batch after the other, and facts of its cache (engine.py)."""
    out, log = folder / "out.json", folder / "log"
    environment = options.pop("environment", {})
    asked = {"rounds": rounds, "options": options, "environment": environment, "patch": options.pop("patch", "")}
    code = ask(model=str(directory), out=str(out), log=str(log), **asked)
    assert code == 0, log.read_text()[-6000:]
    return json.loads(out.read_text())


def refused(directory: Path, folder: Path, environment: dict[str, str] | None = None) -> str:
    """What vLLM says when it does not serve."""
    log = folder / "log"
    asked = {"prompts": PROMPTS, "tokens": 1, "options": {}, "environment": environment or {}}
    assert ask(model=str(directory), out=str(folder / "out.json"), log=str(log), **asked) == 1
    return log.read_text()


class Server:
    """An HTTP server of vLLM with the API of OpenAI."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def complete(self, ids: list[int]) -> str:
        """What follows these tokens, greedily."""
        asked = {"model": "m", "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        data, kind = json.dumps(asked).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.address}/v1/completions", data, kind)
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)["choices"][0]["text"]

    def metric(self, name: str) -> float:
        """The sum of a counter over its labels."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=60) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


@contextmanager
def server(directory: Path, folder: Path, *words: str) -> Iterator[Server]:
    """A server, until the end of the block; words: further options of its command line."""
    log = folder / "log"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = ["--model", str(directory), "--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    options += ["--port", str(port), "--served-model-name", "m", *words]
    number = ask(serve=options, log=str(log), environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    try:
        _wait_for(port, log)
        yield Server(port)
    finally:
        os.killpg(number, signal.SIGTERM)


def _wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-6000:])
