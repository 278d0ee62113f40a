"""A real server for hostile use: the demo model behind a template that obeys whoever asks it to misbehave."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

KEY = "not-in-ps-7f3a"
SERVED = "demo"
_READY = re.compile(r"ready: (http://\S+?)[ ,]")

TEMPLATE = (
    "{% set word = messages[-1].content %}"
    "{% if word == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif word == 'swell' %}{{ '%1000000000d' % 1 }}"
    "{% elif word == 'repeat' %}{{ 'x' * 10000000000 }}"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def save_tokenizer(directory: Path) -> Path:
    """The demo's, with `TEMPLATE` as its chat template."""
    from engine.frontend.demo import demo_model_path
    from engine.frontend.tokenizer_source import load_with_transformers

    hf = load_with_transformers(demo_model_path())
    hf.chat_template = TEMPLATE
    hf.save_pretrained(directory)
    return directory


class HostileServer:
    """The process, its address, and what of it is measured."""

    def __init__(self, process: subprocess.Popen[str], sockets: Path) -> None:
        self.process = process
        self.log: list[str] = []
        self.base = ""
        self._sockets = sockets
        self._front_end = psutil.Process(process.pid)

    @property
    def resident_bytes(self) -> int:
        """Of the front end alone: neither the core nor those who render and tokenize for it."""
        return int(self._front_end.memory_info().rss)

    @property
    def command_line(self) -> str:
        return " ".join(self._front_end.cmdline())

    @property
    def core_address(self) -> str:
        """Where the core listens for messages of its front end."""
        [socket] = self._sockets.glob("pageloom-*/to-core")
        return f"ipc://{socket}"

    def read_until_ready(self) -> None:
        assert self.process.stderr is not None
        ready = threading.Event()

        def read() -> None:
            for line in self.process.stderr or ():
                self.log.append(line.rstrip())
                if not self.base and (found := _READY.search(line)):
                    self.base = found.group(1)
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        ready.wait(300)
        assert self.base, "\n".join(self.log[-20:])


@contextlib.contextmanager
def hostile_server(directory: Path, *arguments: str) -> Iterator[HostileServer]:
    """Ready when it is given; killed at the end if it still runs."""
    (directory / "key").write_text(KEY + "\n")
    sockets = directory / "s"
    sockets.mkdir()
    command = [sys.executable, "-m", "entrypoints.serve", "--port", "0", "--served-model-name", SERVED]
    command += ["--tokenizer", str(save_tokenizer(directory / "tokenizer")), "--api-key-file", str(directory / "key")]
    command += ["--kv-cache-memory", "512MiB", "--max-num-seqs", "32", "--compile", "none", *arguments]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(sockets)},
        stderr=subprocess.PIPE,
        text=True,
    )
    server = HostileServer(process, sockets)
    try:
        server.read_until_ready()
        yield server
    finally:
        process.kill()
        process.wait()
