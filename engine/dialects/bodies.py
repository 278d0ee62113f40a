"""What stands between the marks of a call, made into calls."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Mapping
from math import isfinite
from typing import Any

from engine.dialects.forms import Call, Dialect

_ARGUMENTS = ("arguments", "parameters", "args")
_NAMES = ("name", "tool_name", "function")
_LOOSE = re.compile(
    r'<\|"\|>(?P<marked>.*?)<\|"\|>|<escape>(?P<escaped>.*?)<escape>|"(?:[^"\\]|\\.)*+"'
    r"|(?P<key>[^\s{}\[\],:\"<]+)\s*:|[\s\S]",
    re.DOTALL,
)
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_NAME = re.compile(r"[^\s\"'<>{}\[\]()\\]{1,256}")
_BETWEEN = re.compile(r"[\s,;]*")
_DECODER = json.JSONDecoder()
_LETTERS = string.ascii_letters + string.digits
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def calls_of(value: Any, dialect: Dialect, number: int) -> list[Call] | None:
    """`value`: of a region of calls, as its template makes it; `number`: calls that came before. None: it holds no
    calls, whatever its marks say."""
    if not isinstance(value, Mapping):
        return _several(value, dialect, number) if isinstance(value, list) else None
    if "by_name" in value:
        return _by_name(value["by_name"], dialect, number)
    if "python" in value:
        return _python_calls(value["python"], dialect, number)
    if "loose" in value:
        return _several([{"name": value.get("name"), "arguments": _loose(value["loose"])}], dialect, number)
    found = value.get("function", value)
    if isinstance(found, str):
        found = _in_a_row(found)
    if isinstance(found, list):
        return _several(found, dialect, number)
    call = _call(found, dialect, number, value.get("id"))
    return None if call is None else [call]


def _several(found: list[Any], dialect: Dialect, number: int) -> list[Call] | None:
    calls: list[Call] = []
    for each in found:
        inner = each.get("function", each) if isinstance(each, Mapping) else each
        call = _call(each if isinstance(inner, str) else inner, dialect, number + len(calls))
        if call is None:
            return None
        calls.append(call)
    return calls or None


def _by_name(found: Any, dialect: Dialect, number: int) -> list[Call] | None:
    """``[{"f": {"a": 1}}, …]``."""
    each = found if isinstance(found, list) else [found]
    if not all(isinstance(one, dict) and len(one) == 1 for one in each):
        return None
    return _several(
        [{"name": name, "arguments": given} for one in each for name, given in one.items()], dialect, number
    )


def _in_a_row(text: str) -> list[Any] | None:
    """Texts of JSON, one behind the other. None where they are not."""
    found: list[Any] = []
    at = 0
    while (start := _BETWEEN.match(text, at)) is not None and start.end() < len(text):
        try:
            value, at = _DECODER.raw_decode(text, start.end())
        except (ValueError, RecursionError):
            return None
        found.append(value)
    return found


def _call(found: Any, dialect: Dialect, number: int, given_id: object = None) -> Call | None:
    if not isinstance(found, Mapping):
        return None
    name = next((found[key] for key in _NAMES if isinstance(found.get(key), str)), None)
    arguments: Any = next((found[key] for key in _ARGUMENTS if found.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = json_or_none(arguments) if arguments.strip() else {}
    if name is None or not isinstance(arguments, Mapping) or _NAME.fullmatch(name.strip()) is None:
        return None
    return _made(name.strip(), dict(arguments), dialect, number, given_id)


def _made(name: str, arguments: dict[str, Any], dialect: Dialect, number: int, given_id: object = None) -> Call:
    plain = _finite(arguments)
    text = json.dumps(plain, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair, which JSON can only write as such
        text = json.dumps(plain)
    return Call(new_id(name, dialect, number, given_id), name, text)


def _finite(value: Any) -> Any:
    """JSON knows no infinities, and nothing that is no number: null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value


def _loose(text: str) -> Any:
    """JSON whose keys have no quotes, and whose texts may stand between marks. None where it is not."""
    parts = []
    for found in _LOOSE.finditer(text):
        marked = next((each for each in (found["marked"], found["escaped"]) if each is not None), None)
        if marked is not None:
            parts.append(json.dumps(marked))
        else:
            parts.append(json.dumps(found["key"]) + ":" if found["key"] is not None else found.group())
    return json_or_none("".join(parts))


def new_id(name: str, dialect: Dialect, number: int, given: object) -> str:
    """Of a call before which there were `number`. `given`: what the model calls it, if it does."""
    if dialect.call_ids == "nine":
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    if dialect.call_ids == "own":
        text = given.strip() if isinstance(given, str) else name
        text = text if text.startswith("functions.") else f"functions.{text}"
        return text if ":" in text else f"{text}:{number}"
    return f"call_{secrets.token_hex(12)}"


def json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _python_calls(text: str, dialect: Dialect, number: int) -> list[Call] | None:
    """``[f(a=1), g(b="x")]``, brackets or lines between calls or not; of values only literals."""
    inside = _QUOTED.sub(_in_a_line, text.strip().removeprefix("[").removesuffix("]").strip())
    for source in (inside, f"[{inside}]"):
        try:
            return _calls_in(source, dialect, number)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _in_a_line(text: re.Match[str]) -> str:
    """Models end lines within texts where Python does not."""
    return text.group().replace("\n", "\\n") if "\n" in text.group() else text.group()


def _calls_in(source: str, dialect: Dialect, number: int) -> list[Call] | None:
    """Raises ValueError and what `ast.parse` raises."""
    calls: list[Call] = []
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Expr):
            return None
        body = statement.value
        for node in body.elts if isinstance(body, (ast.List, ast.Tuple)) else [body]:
            if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, (ast.Name, ast.Attribute)):
                return None
            arguments = {each.arg: _literal(each.value, source) for each in node.keywords if each.arg is not None}
            calls.append(_made(ast.unparse(node.func), arguments, dialect, number + len(calls)))
    return calls or None


def _literal(node: ast.expr, source: str) -> Any:
    """Texts may be JSON's, too, whose escapes are more. Raises ValueError."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _text(node, source)
        if node.value is None or isinstance(node.value, (bool, int, float)):
            return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(each, source) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key, source) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return {key: _literal(value, source) for key, value in zip(keys, node.values)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
    raise ValueError("not a literal")


def _text(node: ast.Constant, source: str) -> str:
    assert isinstance(node.value, str)
    if "\\" in (written := ast.get_source_segment(source, node) or "") and written.startswith('"'):
        as_json = json_or_none(written)
        if isinstance(as_json, str):
            return as_json
    return node.value
