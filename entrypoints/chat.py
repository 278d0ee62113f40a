"""`engine-chat`: a conversation in the terminal, with a model in this process or with any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from entrypoints.options import add_engine_options, engine_args, refuse_without_effect

if TYPE_CHECKING:
    from engine import AsyncEngine

Messages = list[dict[str, str]]
Reply = Callable[[Messages], AsyncIterator[str]]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine-chat", description=__doc__)
    parser.add_argument("model", nargs="?", help="Hugging Face directory or GGUF file; without it, the demo model")
    parser.add_argument("--url", help="talk to this server (http://host:port) instead of loading a model")
    parser.add_argument("--api-key", help="for --url")
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
        engine_options = argparse.ArgumentParser()
        add_engine_options(engine_options)
        names = {action.dest for action in engine_options._actions} - {"help"}
        refuse_without_effect(parser, options, names, "with --url: the server's own settings hold")
    else:
        refuse_without_effect(parser, options, ["api_key"], "without --url")
    import asyncio

    from engine.errors import EngineError

    try:
        return asyncio.run(_remote(options) if options.url else _local(options))
    except EngineError as error:
        print(f"engine-chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _local(options: argparse.Namespace) -> int:
    import msgspec

    from engine import AsyncEngine

    engine: AsyncEngine = AsyncEngine(engine_args(options, options.model))

    async def reply(messages: Messages) -> AsyncIterator[str]:
        params = msgspec.structs.replace(engine.default_sampling_params(), max_tokens=options.max_tokens)
        if options.temperature is not None:
            params = msgspec.structs.replace(params, temperature=options.temperature)
        ids = await engine.apply_chat_template(messages, add_generation_prompt=True)
        async for output in engine.generate({"prompt_token_ids": ids}, params, delta=True):
            yield output.outputs[0].text

    try:
        await engine.start()
        return await _converse(options, reply)
    finally:
        await engine.shutdown()


async def _remote(options: argparse.Namespace) -> int:
    import httpx

    from engine.errors import EngineError

    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with httpx.AsyncClient(base_url=options.url, headers=headers, timeout=None) as client:

        async def reply(messages: Messages) -> AsyncIterator[str]:
            body: dict[str, object] = {"messages": messages, "max_tokens": options.max_tokens, "stream": True}
            if options.temperature is not None:
                body["temperature"] = options.temperature
            body["model"] = model
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise EngineError(f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}")
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if chunk.get("error"):
                        raise EngineError(str(chunk["error"].get("message")))
                    for choice in chunk.get("choices", []):
                        yield choice["delta"].get("content") or ""

        try:
            model = options.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            return await _converse(options, reply)
        except httpx.HTTPError as error:
            raise EngineError(f"{options.url}: {str(error) or type(error).__name__}") from error


async def _converse(options: argparse.Namespace, reply: Reply) -> int:
    messages: Messages = [{"role": "system", "content": options.system}] if options.system else []
    while True:
        try:
            text = options.quick or input("> ")
        except EOFError:
            return 0
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        answer = ""
        async for piece in reply(messages):
            print(piece, end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})
        if options.quick:
            return 0


if __name__ == "__main__":
    raise SystemExit(main())
