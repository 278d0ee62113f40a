"""What reading answers costs the front end, with tools and thinking on: ``python tools/bench_answers.py``.

Content, thinking and a call's arguments of two thousand tokens each, one token at a time, up to the bytes of
the server-sent events of a chat. Prints µs a token, which is ms for a thousand; the last line is JSON.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, Literal, cast

from engine.dialects.families import DIALECTS
from engine.frontend.tokenizer import Tokenizer
from engine.request import CompletionOutput
from entrypoints.server.answers import Answers
from entrypoints.server.chat_parts import ChatParts
from entrypoints.server.responses import ChatChunk, ChatChunkChoice
from entrypoints.server.speech import Speech
from entrypoints.server.streaming import event
from entrypoints.server.tools import ToolUse

_TOKENS = 2000
_WORDS = ("the ", "answer", " is, ", "that\n", "1 < 2 ", "of ", "course", ". ")
_TOOL = {"type": "function", "function": {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}}}}
_REPEATS = 5


def tokens_of(text: str) -> list[str]:
    """Four characters each, as tokens of plain text are on average."""
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def answers_of(name: str) -> dict[str, list[str]]:
    prose = "".join(_WORDS) * (4 * _TOKENS // len("".join(_WORDS)) + 1)
    prose = prose[: 4 * _TOKENS]
    before, middle, behind = DIALECTS[name].form.call  # type: ignore[union-attr]
    arguments = json.dumps({"text": prose}) if DIALECTS[name].form.arguments is None else ""  # type: ignore[union-attr]
    found = {"content": tokens_of(prose), "thinking": tokens_of(f"<think>\n{prose}")}
    if arguments:
        found["arguments"] = tokens_of(before + "write" + middle + arguments + behind)
    return found


def seconds(speech: Speech, tokens: list[str]) -> float:
    use = ToolUse(tools=[cast(dict[str, Any], _TOOL)])
    answers, shown = Answers(speech, use, None, stream=True), ChatParts("reasoning", use)
    begun = time.perf_counter()
    for number, token in enumerate(tokens, 1):
        reason: Literal["stop"] | None = "stop" if number == len(tokens) else None
        part = CompletionOutput(index=0, text=token, token_ids=[1], finish_reason=reason)
        for delta in shown.deltas(0, answers.pieces(part)):
            event(ChatChunk("chatcmpl-0", 0, "model", [ChatChunkChoice(0, delta)], system_fingerprint="fp"))
    return time.perf_counter() - begun


def main() -> None:
    results: dict[str, dict[str, float]] = {}
    template = "{{ tools }}<think></think>"
    tokenizer = SimpleNamespace(chat_template_text=lambda _: template, response_template=None, backend=None)
    for name in ("hermes", "mistral", "qwen3_coder", "kimi_k2"):
        speech = Speech(cast(Tokenizer, tokenizer), tool_parser=name, reasoning_parser="think")
        for kind, tokens in answers_of(name).items():
            best = min(seconds(speech, tokens) for _ in range(_REPEATS))
            results.setdefault(name, {})[kind] = round(best / len(tokens) * 1e6, 1)
            print(f"{name:12} {kind:10} {results[name][kind]:6.1f} µs a token")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
