"""A session of Codex's: the shapes of its requests, by its public source; words are our own."""

from __future__ import annotations

from typing import Any

from agent_model import prose

PATCH = "*** Begin Patch\n*** Update File: parser.py\n@@\n-a = 1\n+b = 1\n*** End Patch\n"
GRAMMAR = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " NAME LF change+
change: ("@@" | /[-+ ][^\n]*/) LF
NAME: /[^\n]+/
LF: "\n"
"""
TEXT, COUNT, FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}


def function(name: str, words: int, required: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    told = {key: {**value, "description": prose(14, len(key))} for key, value in properties.items()}
    schema = {"type": "object", "properties": told, "required": list(required), "additionalProperties": False}
    return {
        "type": "function",
        "name": name,
        "description": prose(words, len(name)),
        "strict": False,
        "parameters": schema,
    }


STEP = {
    "type": "object",
    "properties": {"step": TEXT, "status": TEXT},
    "required": ["step", "status"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    function(
        "exec_command", 250, ("cmd",), cmd=TEXT, workdir=TEXT, shell=TEXT, tty=FLAG, yield_time_ms=COUNT, login=FLAG
    ),
    function("write_stdin", 120, ("session_id",), session_id=COUNT, chars=TEXT, max_output_tokens=COUNT),
    function("update_plan", 200, ("plan",), explanation=TEXT, plan={"type": "array", "items": STEP}),
    function("view_image", 60, ("path",), path=TEXT),
    function("spawn_agent", 500, ("message",), message=TEXT, agent_type=TEXT),
    function("wait_agent", 300, ("ids",), ids={"type": "array", "items": TEXT}, timeout_ms=COUNT),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": prose(300, 40),
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": prose(20, 41),
        "tools": [function("search", 150, ("query",), query=TEXT), function("fetch", 150, ("url",), url=TEXT)],
    },
    {"type": "web_search", "external_web_access": True, "search_content_types": ["text"]},
]
THREAD = "019a0000-0000-7000-8000-000000000000"
HEADERS = {
    "authorization": "Bearer none",
    "accept": "text/event-stream",
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.90.0 (Debian 12.0.0; x86_64) xterm",
    "session_id": THREAD,
    "conversation_id": THREAD,
}


def message(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


class Session:
    """`body` is the next request; `take` what came of it, and what the tool says to it."""

    def __init__(self, asked: str) -> None:
        self.input = [
            message("developer", f"<permissions instructions>\n{prose(400, 50)}\n</permissions instructions>"),
            message("user", f"# AGENTS.md instructions for /proj\n\n<INSTRUCTIONS>\n{prose(300, 51)}\n</INSTRUCTIONS>"),
            message("user", "<environment_context>\n  <cwd>/proj</cwd>\n  <shell>bash</shell>\n</environment_context>"),
        ]
        self.say(asked)

    def say(self, text: str) -> None:
        self.input.append(message("user", text))

    def body(self) -> dict[str, Any]:
        return {
            "model": "agent",
            "instructions": prose(10000, 52),
            "input": self.input,
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": THREAD,
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": THREAD},
        }

    def take(self, items: list[dict[str, Any]], output: str | None) -> None:
        """Items go back without ids, and of thinking only what is encrypted."""
        for item in items:
            left_out = ("id", "status", "content") if item["type"] == "reasoning" else ("id", "status")
            self.input.append({name: value for name, value in item.items() if name not in left_out})
        last = items[-1]
        if output is not None:
            kind = f"{last['type']}_output"
            self.input.append({"type": kind, "call_id": last["call_id"], "output": output})


def items_of(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Items as each is done, and usage, which comes with the end."""
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed", events[-1]
    return items, events[-1]["response"]["usage"]
