"""A session of Claude Code's: the shapes of its requests, by public descriptions of them; words are our own."""

from __future__ import annotations

import json
from typing import Any

from agent_model import prose

TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "number"}
TEXTS = {"type": "array", "items": TEXT}
TODO = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "minLength": 1},
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
        "activeForm": {"type": "string", "minLength": 1},
    },
    "required": ["content", "status", "activeForm"],
    "additionalProperties": False,
}
GREP = {
    "pattern": TEXT,
    "path": TEXT,
    "glob": TEXT,
    "output_mode": {"type": "string", "enum": ["content", "files_with_matches", "count"]},
    "-B": COUNT,
    "-A": COUNT,
    "-C": COUNT,
    "-n": FLAG,
    "-i": FLAG,
    "type": TEXT,
    "head_limit": COUNT,
    "multiline": FLAG,
}
TOOLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Task": ({"description": TEXT, "prompt": TEXT, "subagent_type": TEXT}, ["description", "prompt", "subagent_type"]),
    "Bash": ({"command": TEXT, "timeout": COUNT, "description": TEXT, "run_in_background": FLAG}, ["command"]),
    "Glob": ({"pattern": TEXT, "path": TEXT}, ["pattern"]),
    "Grep": (GREP, ["pattern"]),
    "ExitPlanMode": ({"plan": TEXT}, ["plan"]),
    "Read": ({"file_path": TEXT, "offset": COUNT, "limit": COUNT}, ["file_path"]),
    "Edit": (
        {"file_path": TEXT, "old_string": TEXT, "new_string": TEXT, "replace_all": {**FLAG, "default": False}},
        ["file_path", "old_string", "new_string"],
    ),
    "Write": ({"file_path": TEXT, "content": TEXT}, ["file_path", "content"]),
    "NotebookEdit": ({"notebook_path": TEXT, "cell_id": TEXT, "new_source": TEXT}, ["notebook_path", "new_source"]),
    "WebFetch": ({"url": {**TEXT, "format": "uri"}, "prompt": TEXT}, ["url", "prompt"]),
    "TodoWrite": ({"todos": {"type": "array", "items": TODO}}, ["todos"]),
    "WebSearch": (
        {"query": {**TEXT, "minLength": 2}, "allowed_domains": TEXTS, "blocked_domains": TEXTS},
        ["query"],
    ),
    "BashOutput": ({"bash_id": TEXT, "filter": TEXT}, ["bash_id"]),
    "KillShell": ({"shell_id": TEXT}, ["shell_id"]),
    "Skill": ({"skill": TEXT, "args": TEXT}, ["skill"]),
    "SlashCommand": ({"command": TEXT}, ["command"]),
}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.12 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
KEPT = {"type": "ephemeral"}


def tools() -> list[dict[str, Any]]:
    found = []
    for number, (name, (properties, required)) in enumerate(TOOLS.items()):
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                key: {**value, "description": prose(12, number)} if "description" not in value else value
                for key, value in properties.items()
            },
            "required": required,
            "additionalProperties": False,
        }
        found.append({"name": name, "description": prose(420, number), "input_schema": schema})
    return found


def block(text: str, *, kept: bool = False) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": KEPT} if kept else {})}


class Session:
    """`body` is the next request; `take` what came of it, and what the tools say to it."""

    def __init__(self, asked: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sent = 0
        reminder = f"<system-reminder>\n{prose(200, 90)}\n</system-reminder>"
        self.say(block(reminder), block(asked))

    def say(self, *blocks: dict[str, Any]) -> None:
        """Only the last message of the user's bears the mark of what is to be cached."""
        for message in self.messages:
            if message["role"] == "user":
                for each in message["content"]:
                    each.pop("cache_control", None)
        self.messages.append({"role": "user", "content": [*blocks[:-1], {**blocks[-1], "cache_control": KEPT}]})

    def system(self) -> list[dict[str, Any]]:
        """Its first line is another with every request."""
        self.sent += 1
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.12.{self.sent:03x}; cc_entrypoint=cli; cch={self.sent:05x};"
        )
        return [block(billing), block(prose(9, 91), kept=True), block(prose(2500, 92), kept=True)]

    def body(self) -> dict[str, Any]:
        ids = {"device_id": "d" * 64, "account_uuid": "", "session_id": "5f4b6e0c-0000-4000-8000-000000000000"}
        return {
            "model": "agent",
            "messages": self.messages,
            "system": self.system(),
            "tools": tools(),
            "metadata": {"user_id": json.dumps(ids)},
            "max_tokens": 32_000,
            "thinking": {"type": "enabled", "budget_tokens": 31_999},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        }

    def title(self) -> dict[str, Any]:
        """What a smaller model is asked first: is this a new topic, and how is it called?"""
        schema = {
            "type": "object",
            "properties": {"title": {"type": "string"}},
            "required": ["title"],
            "additionalProperties": False,
        }
        return {
            "model": "agent",
            "max_tokens": 32_000,
            "temperature": 1,
            "stream": True,
            "tools": [],
            "system": [block(prose(9, 91)), block(prose(120, 93))],
            "messages": [{"role": "user", "content": [block("Rename the parser.")]}],
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
            "metadata": {"user_id": "{}"},
        }

    def count(self) -> dict[str, Any]:
        return {name: self.body()[name] for name in ("model", "messages", "tools")}


def result(use: dict[str, Any], text: str, *, wrong: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "tool_result", "tool_use_id": use["id"], "content": text}
    return {**found, "is_error": True} if wrong else found


def message_of(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str, dict[str, int]]:
    """Blocks, why it stopped, and usage: as its SDK gathers them."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            kind, value = next((key, event["delta"][key]) for key in event["delta"] if key != "type")
            if kind == "partial_json":
                arguments += value
            else:
                blocks[-1][kind] += value
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments or "{}")
    (last,) = (event for event in events if event["type"] == "message_delta")
    return blocks, last["delta"]["stop_reason"], last["usage"]
