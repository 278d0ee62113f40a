"""`engine-chat`: a conversation in the terminal, with a model in this process or with any OpenAI-compatible server.

Ctrl-C ends the answer that is being written; at the prompt, or a second time, it ends the program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from entrypoints.options import (
    FlexibleArgumentParser,
    add_engine_options,
    add_model,
    engine_args,
    refuse_without_effect,
)
from entrypoints.start import INTERRUPTED, interrupts_raise

if TYPE_CHECKING:
    import httpx

Messages = list[dict[str, str]]
Reply = Callable[[Messages], AsyncGenerator[str, None]]


def build_parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(prog="engine-chat", description=__doc__)
    add_model(parser)
    parser.add_argument("--url", help="talk to this server (http://host:port) instead of loading a model")
    parser.add_argument("--api-key", help="for --url; default: PAGELOOM_API_KEY, where it is set")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, help="default: what the model's authors recommend, else 1")
    parser.add_argument("--max-tokens", type=int, default=512, help="per answer")
    parser.add_argument("--quick", metavar="MESSAGE", help="send one message, print the answer, exit")
    add_engine_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.url:
        engine_options = FlexibleArgumentParser()
        add_engine_options(engine_options)
        names = {action.dest for action in engine_options._actions} - {"help"}
        refuse_without_effect(parser, options, names, "with --url: the server's own settings hold")
    else:
        refuse_without_effect(parser, options, ["api_key"], "without --url")
    from engine.errors import EngineError

    try:
        with asyncio.Runner() as runner:
            replies = _remote(options) if options.url else _local(options)
            reply = runner.run(replies.__aenter__())
            interrupts_raise()  # while it started, Ctrl-C ended the process at once, and its core with it
            try:
                return _converse(options, runner, reply)
            finally:
                runner.run(replies.__aexit__(None, None, None))
    except EngineError as error:
        print(f"engine-chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("engine-chat: interrupted", file=sys.stderr)
        return INTERRUPTED


@asynccontextmanager
async def _local(options: argparse.Namespace) -> AsyncGenerator[Reply, None]:
    import msgspec

    from engine.async_engine import AsyncEngine

    engine = AsyncEngine(engine_args(options, options.model))

    async def reply(messages: Messages) -> AsyncGenerator[str, None]:
        params = msgspec.structs.replace(engine.default_sampling_params(), max_tokens=options.max_tokens)
        if options.temperature is not None:
            params = msgspec.structs.replace(params, temperature=options.temperature)
        ids = await engine.apply_chat_template(messages, add_generation_prompt=True)
        async for output in engine.generate({"prompt_token_ids": ids}, params, delta=True):
            yield output.outputs[0].text

    try:
        await engine.start()
        yield reply
    finally:
        await engine.shutdown()


@asynccontextmanager
async def _remote(options: argparse.Namespace) -> AsyncGenerator[Reply, None]:
    import httpx

    from engine.errors import EngineError

    key = options.api_key or os.environ.get("PAGELOOM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base = options.url.rstrip("/").removesuffix("/v1")

    async def reply(messages: Messages) -> AsyncGenerator[str, None]:
        body: dict[str, object] = {"model": model, "messages": messages, "max_tokens": options.max_tokens}
        if options.temperature is not None:
            body["temperature"] = options.temperature
        try:
            async with aclosing(_streamed(client, body)) as pieces:
                async for piece in pieces:
                    yield piece
        except httpx.HTTPError as error:
            raise EngineError(f"{options.url}: {str(error) or type(error).__name__}") from error

    try:
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=None) as client:
            model = options.model or await _first_model(client)
            yield reply
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"--url {options.url}: {str(error) or type(error).__name__}") from error


async def _first_model(client: httpx.AsyncClient) -> str:
    from engine.errors import EngineError

    answer = await client.get("/v1/models")
    if answer.status_code != 200:
        raise EngineError(_refused(answer))
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        raise EngineError(f"{answer.url} lists no model: no OpenAI-compatible server answers there") from None


async def _streamed(client: httpx.AsyncClient, body: dict[str, object]) -> AsyncGenerator[str, None]:
    from engine.errors import EngineError

    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
            raise EngineError(_refused(response))
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if chunk.get("error"):
                raise EngineError(str(chunk["error"].get("message")))
            for choice in chunk.get("choices", []):
                yield choice["delta"].get("content") or ""


def _refused(response: httpx.Response) -> str:
    """In the server's own words."""
    try:
        words = str(response.json()["error"]["message"])
    except (ValueError, TypeError, LookupError):
        words = response.text[:300]
    hint = "; give its key with --api-key or PAGELOOM_API_KEY" if response.status_code == 401 else ""
    return f"{response.url}: HTTP {response.status_code}: {words}{hint}"


def _converse(options: argparse.Namespace, runner: asyncio.Runner, reply: Reply) -> int:
    """Each answer is a run of the event loop: at the prompt, between them, Ctrl-C is `KeyboardInterrupt` as ever."""
    messages: Messages = [{"role": "system", "content": options.system}] if options.system else []
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            text = options.quick or input(prompt)
        except EOFError:
            return 0
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        shown: list[str] = []
        whole = runner.run(_show(reply(messages), shown))
        print()
        if options.quick:
            return 0 if whole else INTERRUPTED
        if whole or shown:
            messages.append({"role": "assistant", "content": "".join(shown)})
        else:
            messages.pop()  # two messages of one speaker in a row are refused by many templates


async def _show(pieces: AsyncGenerator[str, None], shown: list[str]) -> bool:
    """Print an answer as it comes. False where Ctrl-C, which cancels what the runner runs, ended it; a second one
    raises `KeyboardInterrupt`."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                print(piece, end="", flush=True)
                shown.append(piece)
    except asyncio.CancelledError:
        return False
    return True


if __name__ == "__main__":
    from entrypoints.start import chat

    raise SystemExit(chat())
