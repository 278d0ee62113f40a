"""The HTTP application around a real front end and a core that follows a script: no weights, no device.

The scripted core answers every sequence with the same tokens, one a step, and scores them by a fixed rule, so that
tests know what must come out. As a program (`python scripted_server.py MODEL_DIR PORT [KEY=VALUE | --OPTION=VALUE]...`)
it serves over HTTP; the options are those of engine-serve.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine import AsyncEngine, EngineArgs
from engine.core.wire import AbortRequests, AddRequest, CoreReady, CoreStats, SequenceDelta, StepOutputs, ToCore
from engine.errors import CoreDiedError
from engine.frontend.tokenizer import Tokenizer as EngineTokenizer
from engine.limits import Limits
from engine.step import TokenLogprobs
from entrypoints.server.app import create_app
from entrypoints.server.keys import Keyring

CONTEXT = 256
BOS, EOS = 0, 1
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWER = "wörld 😀 ok"


def save_model(
    path: Path,
    *,
    generation: dict[str, object] | None = None,
    bos: bool = True,
    template: str = TEMPLATE,
    special: tuple[str, ...] = (),
    context: int = CONTEXT,
) -> Path:
    """A Llama config and a byte-level tokenizer (one token a byte) that puts <s> before a text, as Llama's does.
    `special`: further special tokens."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i + 2 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    start = tokenizer.token_to_id("<s>")
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    hf.save_pretrained(path)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": hf.bos_token_id,
        "eos_token_id": hf.eos_token_id,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(generation or {}))
    return path


def score_of(token_id: int) -> float:
    return -0.01 * (token_id + 1)


def scored(token_id: int, alternatives: int) -> TokenLogprobs:
    """The token, then tokens 10, 11, … that all beat it: the token itself is never among the likeliest."""
    others = list(range(10, 10 + alternatives))
    logprobs = [score_of(token_id), *(-0.001 * (i + 1) for i in range(alternatives))]
    return TokenLogprobs([token_id, *others], logprobs, 77)


@dataclass
class Script:
    """What the core does; changed by tests between requests."""

    answer: list[int] = field(default_factory=list)
    """token ids of every answer, cut to max_tokens; its end is "stop" by EOS"""
    step_s: float = 0.0
    start_s: float = 0.0
    """how long the core loads, in vain"""
    tokenize_s: float = 0.0
    """how long a thread that nobody can stop tokenizes"""
    stall_at: int | None = None
    """no token from this one on, ever"""
    moved_at: tuple[int, ...] = ()
    """another core has begun with these tokens"""
    die_at: int | None = None
    """the core dies instead of giving this token"""
    refuse: tuple[str, str] | None = None
    """(error_kind, message) instead of an answer"""
    stalled: str | None = None
    """why it seems to hang"""
    cached_tokens: int = 0
    accepted_tokens: int = 0
    """drafts among the first tokens"""
    late_prompt_scores: bool = False
    """the first sample, which carries the prompt's scores, comes last"""
    eos: int = EOS


class ScriptedCore:
    """A `CoreClient`. `added` and `aborted` tell what the front end sent."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.added: list[AddRequest] = []
        self.aborted: set[str] = set()
        self.closed = False
        self._abandoned = threading.Event()
        self._news: asyncio.Queue[StepOutputs | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> CoreReady:
        if self.script.start_s:
            self._abandoned.wait(self.script.start_s)
            raise CoreDiedError("the start was abandoned")
        return CoreReady(
            num_blocks=64,
            block_size=16,
            max_model_len=CONTEXT,
            attention_backend="scripted",
            ledger="",
            distinct_pieces=0,
            pieces_compiled=0,
            startup_seconds=0.0,
        )

    def send(self, message: ToCore) -> None:
        if isinstance(message, AddRequest):
            followers = [
                replace(
                    message, request_id=f.request_id, params=replace(message.params, seed=f.seed, prompt_logprobs=None)
                )
                for f in message.followers
            ]
            for sample in (message, *followers):
                self.added.append(sample)
                task = asyncio.get_running_loop().create_task(self._answer(sample))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        elif isinstance(message, AbortRequests):
            self.aborted.update(message.request_ids)

    def die(self) -> None:
        self._news.put_nowait(None)

    @property
    def running(self) -> int:
        return len(self._tasks)

    def recv(self) -> StepOutputs:
        raise AssertionError("the server receives on its event loop")

    async def recv_async(self) -> StepOutputs:
        outputs = await self._news.get()
        if outputs is None:
            raise CoreDiedError("the core was killed by the script")
        return outputs

    def stalled(self) -> str | None:
        return self.script.stalled

    def abandon(self) -> None:
        self._abandoned.set()

    def close(self) -> None:
        self.closed = True

    def _tell(self, delta: SequenceDelta) -> None:
        self._news.put_nowait(StepOutputs(deltas=[delta], stats=CoreStats(running=self.running)))

    async def _answer(self, request: AddRequest) -> None:
        script, name, params = self.script, request.request_id, request.params
        if script.refuse is not None:
            kind, message = script.refuse
            self._tell(SequenceDelta(request_id=name, finish_reason="error", error=message, error_kind=kind))
            return
        if script.late_prompt_scores and params.prompt_logprobs is not None:
            await asyncio.sleep(0.05)
        tokens = [*script.answer, script.eos][: request.max_tokens]
        for i, token in enumerate(tokens):
            await asyncio.sleep(script.step_s)
            while script.stall_at == i and name not in self.aborted:
                await asyncio.sleep(0.005)
            if name in self.aborted:
                return
            if script.die_at == i:
                self.die()
                return
            ended_by = token if token in params.stop_token_ids and i + 1 >= params.min_tokens else None
            reason = "stop" if ended_by is not None else "length" if i + 1 == len(tokens) else None
            prompt_scores = []
            if i == 0 and params.prompt_logprobs is not None:
                prompt_scores = [scored(t, params.prompt_logprobs) for t in request.prompt_token_ids[1:]]
            self._tell(
                SequenceDelta(
                    request_id=name,
                    token_ids=[token],
                    logprobs=[] if params.logprobs is None else [scored(token, params.logprobs)],
                    prompt_logprobs=prompt_scores,
                    finish_reason=reason,
                    stop_token_id=ended_by,
                    cached_tokens=script.cached_tokens if i == 0 else 0,
                    accepted_tokens=int(0 < i <= script.accepted_tokens),
                    moved=i in script.moved_at,
                )
            )
            if reason is not None:
                return


class Server:
    """One application and its scripted core."""

    def __init__(
        self, model: Path, *, limits: Limits | None = None, max_waiting: int | None = None, **app_options: Any
    ) -> None:
        self.script = Script()
        self.core = ScriptedCore(self.script)
        settings: dict[str, Any] = {} if limits is None else {"limits": limits}
        if max_waiting is not None:
            settings["max_waiting"] = max_waiting
        args = EngineArgs(model=str(model), served_model_name="tiny", device="cpu", compile="none", **settings)
        self.engine = AsyncEngine(args, client_factory=lambda config: self.core)
        if (key := app_options.pop("api_key", None)) is not None:
            app_options["keyring"] = Keyring(key=key)
        self._app_options = app_options
        self.answer = ANSWER

    @asynccontextmanager
    async def app(self) -> AsyncIterator[FastAPI]:
        """The application, in this event loop."""
        await self.engine.start()
        self.script.answer = self.ids(self.answer)
        self.script.eos = self.engine.tokenizer.eos_token_id or 0
        try:
            yield create_app(self.engine, self.engine.served_name, **self._app_options)
        finally:
            await self.engine.shutdown()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """An HTTP client of the application."""
        async with self.app() as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://scripted", timeout=120) as client:
                yield client

    def ids(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode(text, add_special_tokens=False)


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def post_all(server: Server, *requests: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    """The answers to bodies for paths, one after the other; the server is over then."""

    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            return [await client.post(path, json=body) for path, body in requests]

    return asyncio.run(asyncio.wait_for(go(), 300))


def parts(body: str) -> list[str]:
    """The events of a stream, as text; without comments, which come where a machine is slow."""
    return [part for part in body.split("\n\n") if part and not part.startswith(":")]


def events(body: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that must end with [DONE]."""
    lines = [part.removeprefix("data: ") for part in parts(body)]
    assert lines[-1] == "[DONE]", body
    return [json.loads(line) for line in lines[:-1]]


def main() -> int:
    """Serve for real, to be ended by signals."""
    from entrypoints.serve import build_parser
    from entrypoints.server.logs import logging_to_stderr
    from entrypoints.server.run import listening, serve_engine

    model, port, *settings = sys.argv[1:]
    server = Server(Path(model))
    script = server.script
    options = build_parser().parse_args(["--port", port, *(s for s in settings if s.startswith("--"))])
    for setting in settings:
        if setting.startswith("--"):
            continue
        name, value = setting.split("=")
        setattr(script, name, json.loads(value))

    if script.tokenize_s:

        async def encode(self: EngineTokenizer, text: str, **_: object) -> list[int]:
            print("tokenizing", flush=True)
            await asyncio.to_thread(time.sleep, script.tokenize_s)
            return []

        EngineTokenizer.encode_async = encode  # type: ignore[method-assign]

    async def run() -> int:
        script.answer = [20] * 200
        with listening("127.0.0.1", int(port), options.uds) as listener:
            print("listening", listener.getsockname()[1], flush=True)
            return await serve_engine(server.engine, listener, options)

    with logging_to_stderr(options.log_level.upper(), options.log_format):
        return asyncio.run(run())


if __name__ == "__main__":
    raise SystemExit(main())
