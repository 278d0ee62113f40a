"""What a request writes, for xgrammar: its own form of a grammar as text, which any vocabulary compiles.

xgrammar passes over keywords of a schema that it does not know, and over some that stand beside others. Here they are
refused, unless the request is not strict.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequestError
from engine.grammars.language import FIELD, LENIENT, Tags, first_line, parsed, parser_limits

if TYPE_CHECKING:
    from xgrammar import Grammar

    from engine.request import StructuredOutputsParams

PREFIX = "xgrammar:"
"""of a grammar's text on its way to the core"""
_MOST_WHITESPACE = 16
"""between the parts of a JSON text"""

_SAYS_NOTHING = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions",
}  # fmt: skip
_OF_TYPES = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set[str](),
    "null": set[str](),
}
_OF_NAMES = ("$defs", "definitions", "properties")
_OF_LISTS = ("anyOf", "prefixItems")
_OF_ONE = ("items", "additionalProperties")
"""keywords whose values hold schemas"""
_PLAIN = r"[ !#-\[\]-~\u00a0-\ud7ff\ue000-\ufffd]"
"""characters that JSON writes as they are"""
_FORMATS = {"uuid"}
"""others are looser than what they stand for: xgrammar has a 31st of November"""
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def xgrammar_of(params: StructuredOutputsParams) -> tuple[Grammar, list[str]]:
    """And what of it has no effect (`strict=False`). Raises `InvalidRequestError`."""
    passed_over: list[str] = []
    try:
        return _grammar(params, passed_over), passed_over
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError(f"{FIELD}: it nests too deep", FIELD) from None
    except (RuntimeError, ValueError) as error:
        raise InvalidRequestError(f"{FIELD}: {reason_of(error)}", FIELD) from None


def reason_of(error: Exception) -> str:
    """Without the time and the place in the library."""
    return first_line(re.sub(r"^\[[\d:]+\] \S+: ", "", str(error))) or type(error).__name__


def _grammar(params: StructuredOutputsParams, passed_over: list[str]) -> Grammar:
    from xgrammar import Grammar

    if params.whitespace_pattern is not None:
        raise InvalidRequestError(f"{FIELD}.whitespace_pattern: backend='xgrammar' has none", FIELD)
    if params.json is not None or params.json_object:
        schema = {"type": "object"} if params.json is None else parsed(params.json, "json")
        _check(schema, params, passed_over)
        return Grammar.from_json_schema(json.dumps(_with_plain_lengths(schema)), **_options(params))
    if params.structural_tag is not None:
        return Grammar.from_structural_tag(_tags(params, passed_over))
    if params.regex is not None:
        return Grammar.from_regex(params.regex)
    if params.choice is not None:
        return Grammar.from_ebnf("root ::= " + " | ".join(f'"{_escaped(choice)}"' for choice in params.choice))
    text = params.grammar or ""
    return Grammar.from_ebnf(text) if "::=" in text else Grammar.from_lark(text)


def _options(params: StructuredOutputsParams) -> dict[str, Any]:
    spaces: dict[str, Any] = (
        {"any_whitespace": False, "separators": (",", ":")}
        if params.disable_any_whitespace
        else {"any_whitespace": True, "max_whitespace_cnt": _MOST_WHITESPACE}
    )
    return {"strict_mode": params.disable_additional_properties, **spaces}


def _escaped(text: str) -> str:
    special = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "".join(special.get(c) or (c if c >= " " and c != "\x7f" else f"\\x{ord(c):02x}") for c in text)


def _tags(params: StructuredOutputsParams, passed_over: list[str]) -> str:
    tags = Tags.of(params.structural_tag)
    for tag in tags.structures:
        _check(tag.schema, params, passed_over)
    each = [
        {
            "begin": tag.begin,
            "content": {"type": "json_schema", "json_schema": _with_plain_lengths(tag.schema)},
            "end": tag.end,
        }
        for tag in tags.structures
    ]
    form = {"type": "triggered_tags", "triggers": tags.triggers, "tags": each}
    return json.dumps({"type": "structural_tag", "format": form})


def _check(schema: Any, params: StructuredOutputsParams, passed_over: list[str]) -> None:
    """Raises `InvalidRequestError` for what would have no effect."""
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(f"{FIELD}.json: a JSON schema is an object, not {type(schema).__name__}", FIELD)
    found = list(dict.fromkeys(_unknown(schema)))
    if found and params.strict:
        raise InvalidRequestError(
            f"{FIELD}: backend='xgrammar' does not know {found[0]} ({LENIENT} passes over it)", FIELD
        )
    passed_over += [f"{each} has no effect" for each in found]


def _unknown(schema: Any) -> list[str]:
    """What of it xgrammar passes over."""
    if not isinstance(schema, dict):
        return []
    found: list[str] = []
    for key in _OF_NAMES:
        found += [each for one in (schema.get(key) or {}).values() for each in _unknown(one)]
    for key in _OF_ONE:
        found += _unknown(schema.get(key))
    for key in _OF_LISTS:
        found += [each for one in schema.get(key) or () for each in _unknown(one)]
    says = set(schema) - _SAYS_NOTHING
    for alone in ("$ref", "anyOf", "const", "enum"):
        if alone in says:
            others = says - {alone} - ({"type"} if alone in ("const", "enum") else set())
            found += [f"{other!r} beside {alone!r}" for other in sorted(others)]
            values = [schema["const"]] if alone == "const" else schema["enum"] if alone == "enum" else []
            return found + ["values that are not of 'type'"] * (not all(_is_of(v, schema.get("type")) for v in values))
    return found + _unknown_of_type(schema, says)


def _with_plain_lengths(schema: Any) -> Any:
    """Strings of bounded lengths as patterns: what xgrammar makes of them may hold control characters as they are."""
    if not isinstance(schema, dict):
        return schema
    plain = dict(schema)
    for key in _OF_NAMES:
        if isinstance(plain.get(key), dict):
            plain[key] = {name: _with_plain_lengths(each) for name, each in plain[key].items()}
    for key in _OF_LISTS:
        if isinstance(plain.get(key), list):
            plain[key] = [_with_plain_lengths(each) for each in plain[key]]
    for key in _OF_ONE:
        if key in plain:
            plain[key] = _with_plain_lengths(plain[key])
    low, high = plain.pop("minLength", None), plain.pop("maxLength", None)
    if low is not None or high is not None:
        plain.setdefault("pattern", f"^{_PLAIN}{{{low or 0},{'' if high is None else high}}}$")
    return plain


def _is_of(value: Any, kind: Any) -> bool:
    kinds = [kind] if isinstance(kind, str) else kind
    return kinds is None or any(
        isinstance(value, _PYTHON_TYPES.get(k, ())) and (k == "boolean" or not isinstance(value, bool)) for k in kinds
    )


def _unknown_of_type(schema: dict[str, Any], says: set[str]) -> list[str]:
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    if not kinds and "properties" in says:
        kinds = ["object"]
    known = {"type"}.union(*(_OF_TYPES.get(each, set()) for each in kinds if isinstance(each, str)))
    found = [repr(key) for key in sorted(says - known)]
    if "format" in says and schema["format"] not in _FORMATS:
        found.append(f"the format {schema['format']!r}")
    if "pattern" in says and not _is_plain(schema["pattern"]):
        found.append(f"how JSON writes what may match {schema['pattern']!r}")
    if len(says & {"pattern", "format"}) + bool(says & {"minLength", "maxLength"}) > 1:
        found.append("lengths, 'pattern' and 'format' of one string")
    return found


def _is_plain(pattern: Any) -> bool:
    """Nothing that it matches is written with a backslash in JSON: xgrammar takes texts between quotes as they are."""
    from llguidance import LLMatcher, LLTokenizer, regex_to_lark

    if not isinstance(pattern, str):
        return False
    pattern = regex_to_lark(pattern.removeprefix("^").removesuffix("$"), "dw")
    grammar = "start: T\nT: P & Q\nP: /" + pattern + "/\nQ: /" + r'[^"\\\x00-\x1f]*["\\\x00-\x1f](.|\n)*' + "/"
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.is_error() and matcher.get_error().startswith("NoExtension")
