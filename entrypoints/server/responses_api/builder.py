"""A response as it grows: output items from pieces of an answer, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.dialects.forms import Call, Piece
from entrypoints.server.logprobs import ChatLogprob
from entrypoints.server.responses import new_item_id, now
from entrypoints.server.responses_api.fields import ResponseObject
from entrypoints.server.responses_api.items import sealed
from entrypoints.server.tools import input_of

Event = dict[str, Any]
_INPUTS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""where a call's input stands, and in which events"""


class ResponseBuilder:
    """`feed` what comes, then `finish`. Events hold `sequence_number`; the response is there at any time."""

    def __init__(
        self,
        response: ResponseObject,
        *,
        custom: frozenset[str],
        namespaces: dict[str, tuple[str, str]],
        with_logprobs: bool,
        seals: bool,
    ) -> None:
        """`seals`: thinking goes to the client in a form to bring back."""
        self.response = response
        self._custom, self._namespaces = custom, namespaces
        self._with_logprobs, self._seals = with_logprobs, seals
        self._numbers = 0
        self._text = ""
        self._logprobs: list[Any] = []
        self._open: dict[str, Any] | None = None

    def start(self) -> list[Event]:
        return [self._event(f"response.{name}", response=self._shown()) for name in ("created", "in_progress")]

    def feed(self, pieces: Sequence[Piece], logprobs: Sequence[ChatLogprob] = ()) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if piece.call is not None:
                events += [*self._close(), *self._call(piece.call)]
            elif piece.arguments:
                events.append(self._more_input(piece.arguments))
            elif piece.reasoning:
                events += self._grow("reasoning", piece.reasoning, ())
            else:
                events += self._grow("message", piece.content, logprobs)
                logprobs = ()
        return events

    def finish(self, reason: str | None, usage: Any, schema_error: str | None = None) -> list[Event]:
        """`reason`: as completions have it."""
        response = self.response
        events = [] if response.output else self._begin("message")
        status = "incomplete" if reason == "length" else "completed"
        events += self._close(status)
        if reason == "length":
            response.incomplete_details = {"reason": "max_output_tokens"}
        if schema_error is not None:
            response.schema_error = schema_error
        return [*events, self.end(status, usage)]

    def end(self, status: str, usage: Any) -> Event:
        response = self.response
        response.usage, response.status = usage, status
        response.completed_at = now() if status == "completed" else None
        return self._event(f"response.{status}", response=self._shown())

    def cancel(self) -> None:
        self._open = None
        self.response.output, self.response.status = [], "cancelled"

    def fail(self, code: str, message: str) -> list[Event]:
        self._open = None
        self.response.output = []  # what made it fail may be in there
        self.response.status, self.response.error = "failed", {"code": code, "message": message}
        return [self._event("response.failed", response=self._shown())]

    def _event(self, kind: str, **fields: Any) -> Event:
        self._numbers += 1
        return {"type": kind, "sequence_number": self._numbers - 1, **fields}

    def _shown(self) -> Any:
        """As it is now: events are encoded later."""
        return msgspec.to_builtins(self.response)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.response.output) - 1}

    def _grow(self, kind: str, text: str, logprobs: Sequence[ChatLogprob]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            events += [*self._close(), *self._begin(kind)]
        self._text += text
        place = {**self._place(), "content_index": 0, "delta": text}
        if kind == "reasoning":
            return [*events, self._event("response.reasoning_text.delta", **place)]
        found = [msgspec.to_builtins(each) for each in logprobs] if self._with_logprobs else []
        self._logprobs += found
        return [*events, self._event("response.output_text.delta", **place, logprobs=found)]

    def _begin(self, kind: str) -> list[Event]:
        prefix = "rs" if kind == "reasoning" else "msg"
        item: dict[str, Any] = {"type": kind, "id": new_item_id(prefix), "status": "in_progress"}
        item |= {"summary": [], "content": []} if kind == "reasoning" else {"role": "assistant", "content": []}
        self._open, self._text, self._logprobs = item, "", []
        self.response.output.append(item)
        added = self._event(
            "response.output_item.added", output_index=self._place()["output_index"], item={**item, "content": []}
        )
        return [added, self._event("response.content_part.added", **self._place(), content_index=0, part=self._part())]

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def _close(self, status: str = "completed") -> list[Event]:
        item = self._open
        if item is None:
            return []
        events = self._close_call(item, status) if item["type"] in _INPUTS else self._close_text(item, status)
        place = self._place()
        self._open = None
        return [
            *events,
            self._event("response.output_item.done", output_index=place["output_index"], item=dict(item)),
        ]

    def _close_text(self, item: dict[str, Any], status: str) -> list[Event]:
        place, part = self._place(), self._part()
        item |= {"status": status, "content": [part]}
        if item["type"] == "reasoning":
            if self._seals:
                item["encrypted_content"] = sealed(self._text)
            done = self._event("response.reasoning_text.done", **place, content_index=0, text=self._text)
        else:
            done = self._event(
                "response.output_text.done", **place, content_index=0, text=self._text, logprobs=self._logprobs
            )
        return [done, self._event("response.content_part.done", **place, content_index=0, part=part)]

    def _close_call(self, item: dict[str, Any], status: str) -> list[Event]:
        field, told = _INPUTS[item["type"]]
        item |= {field: self._text, "status": status}
        more = {"name": item["name"]} if field == "arguments" else {}
        return [self._event(f"response.{told}.done", **self._place(), **{field: self._text}, **more)]

    def _call(self, call: Call) -> list[Event]:
        """It stays open where its arguments follow."""
        custom = call.name in self._custom
        kind = "custom_tool_call" if custom else "function_call"
        item: dict[str, Any] = {"type": kind, "id": new_item_id("ctc" if custom else "fc"), "call_id": call.id}
        item |= {"name": call.name, _INPUTS[kind][0]: "", "status": "in_progress"}
        if call.name in self._namespaces:
            item["namespace"], item["name"] = self._namespaces[call.name]
        self._open, self._text = item, ""
        self.response.output.append(item)
        index = self._place()["output_index"]
        events = [self._event("response.output_item.added", output_index=index, item=dict(item))]
        if call.arguments:
            events.append(self._more_input(input_of(call.arguments) if custom else call.arguments))
        if call.arguments and call.complete:
            events += self._close()
        return events

    def _more_input(self, text: str) -> Event:
        assert self._open is not None
        self._text += text
        return self._event(f"response.{_INPUTS[self._open['type']][1]}.delta", **self._place(), delta=text)
