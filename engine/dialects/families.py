"""Every dialect that is known by name. What a family writes is a fact about its models: their chat templates show it.

`fields` reads generously (whitespace, marks that are left out), `form` writes exactly what the models were taught.
"""

from __future__ import annotations

from typing import Any

from engine.dialects.forms import CallForm, Dialect, Tagged

_JSON: dict[str, Any] = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
_WHOLE = {"function": "{content}"}
"""a body of {"name", "arguments"}, or a list of them"""


def _json(end: str = "", **anchors: str) -> dict[str, dict[str, Any]]:
    named = "(?P<name>" in anchors.get("open_pattern", "")
    return {"tool_calls": {**_JSON, **anchors, "transform": _NAMED if named else _WHOLE}, **_nothing(end)}


def _tagged(tag: str, argument: tuple[str, str], end: str = "", **anchors: str) -> dict[str, dict[str, Any]]:
    """`argument`: the marks of one's value; marks of the call within it are a part of it."""
    args = {"tag_pattern": tag, "argument": argument}
    rest = {"content": "xml-inline", "content_args": args, "repeats": True, "transform": _NAMED}
    return {"tool_calls": {**anchors, **rest}, **_nothing(end)}


def _nothing(end: str) -> dict[str, dict[str, Any]]:
    """A mark that may come behind all calls, and says nothing."""
    return {"nothing": {"open": end, "close_pattern": "", "repeats": True}} if end else {}


def _python(**anchors: str) -> dict[str, dict[str, Any]]:
    return {"tool_calls": {**anchors, "content": "text", "repeats": True, "transform": {"python": "{content}"}}}


_OBJECT = ('{"name": "', '", "arguments": ', "}")
_KEYWORD = Tagged("{key}={value}", joined=", ", texts="json", python=True)
_FUNCTION = Tagged("<parameter={key}>\n{value}\n</parameter>\n")

_DIALECTS = (
    Dialect(
        name="harmony",  # gpt-oss
        known_by=("<|channel|>", "<|message|>", "<|start|>"),
        thinking=None,
        opens="<|channel|>analysis<|message|>",
        closes=("<|end|><|start|>assistant<|channel|>final<|message|>", "<|end|><|start|>assistant"),
        fields={
            "reasoning": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis[^<]{0,64}+<\|message\|>",
                "close_pattern": r"<\|end\|>|<\|return\|>|<\|call\|>",
                "repeats": True,
            },
            "response": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)(?! to=)[^<]{0,64}+"
                r"(?:<\|constrain\|>[^<]{0,64}+)?<\|message\|>",
                "close_pattern": r"<\|end\|>|<\|return\|>",
                "repeats": True,
            },
            **_json(
                open_pattern=r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? to=(?:functions\.)?"
                r"(?P<name>[^\s<]{1,256}+)[^<]{0,64}+(?:<\|channel\|>[^<]{0,64}+)?"
                r"(?:<\|constrain\|>[^<]{0,64}+)?<\|message\|>",
                close_pattern=r"<\|call\|>|<\|end\|>",
            ),
        },
        form=CallForm(
            call=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""), parallel=False
        ),
    ),
    Dialect(
        name="kimi_k2",
        known_by=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        call_ids="own",
        fields={
            "tool_calls": {
                **_JSON,
                "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s{0,8}+)?<\|tool_call_begin\|>\s{0,8}+"
                r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256}+)(?::\d{1,9}+)?)\s{0,8}+<\|tool_call_argument_begin\|>",
                "close": "<|tool_call_end|>",
                "transform": {"id": "{id}", **_NAMED},
            },
            **_nothing("<|tool_calls_section_end|>"),
        },
        form=CallForm(
            begin="<|tool_calls_section_begin|>",
            call=("<|tool_call_begin|>functions.", ":{n}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            end="<|tool_calls_section_end|>",
        ),
    ),
    Dialect(
        name="minimax_m2",
        known_by=("<minimax:tool_call>",),
        fields=_tagged(
            r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>',
            ('<parameter name="', "</parameter>"),
            open_pattern=r'(?:<minimax:tool_call>\s{0,8}+)?<invoke name="(?P<name>[^"<>\n]{1,256}+)">',
            close="</invoke>",
            end="</minimax:tool_call>",
        ),
        form=CallForm(
            begin="<minimax:tool_call>\n",
            call=('<invoke name="', '">\n', "</invoke>\n"),
            end="</minimax:tool_call>",
            arguments=Tagged('<parameter name="{key}">{value}</parameter>\n'),
        ),
    ),
    Dialect(
        name="seed_oss",
        known_by=("<seed:tool_call>",),
        thinking=("<seed:think>", "</seed:think>"),
        fields=_tagged(
            r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>",
            ("<parameter=", "</parameter>"),
            open_pattern=r"(?:<seed:tool_call>\s{0,8}+)?<function=(?P<name>[^>\n]{1,256}+)>",
            close="</function>",
            end="</seed:tool_call>",
        ),
        form=CallForm(
            call=("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"),
            between="\n",
            arguments=Tagged("<parameter={key}>{value}</parameter>\n"),
        ),
    ),
    Dialect(
        name="qwen3_coder",  # and Qwen3.5, Nemotron 3
        known_by=("<function=", "<parameter="),
        fields=_tagged(
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            ("<parameter=", "</parameter>"),
            open_pattern=r"(?:<tool_call>\s{0,8}+)?<function=(?P<name>[^>\n]{1,256}+)>",
            close="</function>",
            end="</tool_call>",
        ),
        form=CallForm(
            call=("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"), between="\n", arguments=_FUNCTION
        ),
    ),
    Dialect(
        name="glm45",  # and 4.6, 4.7
        known_by=("<arg_key>", "<arg_value>"),
        fields=_tagged(
            r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            ("<arg_value>", "</arg_value>"),
            open_pattern=r"<tool_call>\s{0,8}+(?P<name>[^\s<]{1,256}+)\s{0,8}+",
            close="</tool_call>",
        ),
        form=CallForm(
            call=("<tool_call>", "\n", "</tool_call>"),
            between="\n",
            arguments=Tagged("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),
        ),
    ),
    Dialect(
        name="deepseek_v3",  # and R1
        known_by=("<｜tool▁call▁begin｜>", "```json"),
        fields=_json(
            open_pattern=r"(?:<｜tool▁calls▁begin｜>\s{0,8}+)?<｜tool▁call▁begin｜>\s{0,8}+function<｜tool▁sep｜>"
            r"(?P<name>[^\n<]{1,256}+)\n```json\s{0,8}+",
            close_pattern=r"\s{0,8}+```\s{0,8}+<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        form=CallForm(
            begin="<｜tool▁calls▁begin｜>",
            call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    Dialect(
        name="deepseek_v31",
        known_by=("<｜tool▁call▁begin｜>",),
        fields=_json(
            open_pattern=r"(?:<｜tool▁calls▁begin｜>\s{0,8}+)?<｜tool▁call▁begin｜>\s{0,8}+"
            r"(?P<name>[^\s<]{1,256}+)\s{0,8}+<｜tool▁sep｜>",
            close="<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        form=CallForm(
            begin="<｜tool▁calls▁begin｜>",
            call=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    Dialect(
        name="mistral",  # from tokenizer version 11 on
        known_by=("[TOOL_CALLS]", "[ARGS]"),
        thinking=("[THINK]", "[/THINK]"),
        call_ids="nine",
        fields=_json(
            open_pattern=r"\[TOOL_CALLS\]\s{0,8}+(?P<name>[^\s\[\]{}]{1,256}+)(?:\[CALL_ID\][^\[]{0,64}+)?\[ARGS\]",
            close_pattern=r"(?=\[TOOL_CALLS\])",
        ),
        form=CallForm(call=("[TOOL_CALLS]", "[ARGS]", "")),
    ),
    Dialect(
        name="mistral_v3",  # up to version 7
        known_by=("[TOOL_CALLS]",),
        thinking=("[THINK]", "[/THINK]"),
        call_ids="nine",
        fields=_json(open="[TOOL_CALLS]"),
        form=CallForm(begin="[TOOL_CALLS] [", call=_OBJECT, between=", ", end="]"),
    ),
    Dialect(
        name="gemma4",
        known_by=("<|tool_call>", '<|"|>'),
        thinking=("<|channel>thought\n", "<channel|>"),
        fields={
            "tool_calls": {
                "repeats": True,
                "open_pattern": r"<\|tool_call>call:(?P<name>[^{\s<]{1,256}+)(?=\{)",
                "close": "<tool_call|>",
                "content": "text",
                "transform": {"name": "{name}", "loose": "{content}"},
            }
        },
        form=CallForm(
            call=("<|tool_call>call:", "{", "}<tool_call|>"),
            arguments=Tagged("{key}:{value}", joined=",", texts=('<|"|>',)),
        ),
    ),
    Dialect(
        name="functiongemma",
        known_by=("<start_function_call>",),
        fields={
            "tool_calls": {
                "repeats": True,
                "open_pattern": r"<start_function_call>call:(?P<name>[^{\s<]{1,256}+)(?=\{)",
                "close": "<end_function_call>",
                "content": "text",
                "transform": {"name": "{name}", "loose": "{content}"},
            }
        },
        form=CallForm(
            call=("<start_function_call>call:", "{", "}<end_function_call>"),
            arguments=Tagged("{key}:{value}", joined=",", texts=("<escape>",)),
        ),
    ),
    Dialect(
        name="llama3_json",
        known_by=('{"name": function name, "parameters":',),
        fields=_json(
            open_pattern=r'(?:<\|python_tag\|>\s{0,8}+)?\{\s{0,8}+(?:"type"\s{0,8}+:\s{0,8}+"function"\s{0,8}+,\s{0,8}+)?'
            r'"name"\s{0,8}+:\s{0,8}+"(?P<name>[^"\n]{1,256}+)"\s{0,8}+,'
            r'\s{0,8}+"(?:parameters|arguments)"\s{0,8}+:\s{0,8}+',
            close_pattern=r"\}\s{0,8}+(?:;(?=\s{0,8}+\{)|\Z)",
        ),
        form=CallForm(call=('{"name": "', '", "parameters": ', "}"), between="; "),
    ),
    Dialect(
        name="llama4_pythonic",
        known_by=("<|python_start|>",),
        fields=_python(open="<|python_start|>", close="<|python_end|>"),
        form=CallForm(
            begin="<|python_start|>[",
            call=("", "(", ")"),
            between=", ",
            end="]<|python_end|>",
            arguments=_KEYWORD,
        ),
    ),
    Dialect(
        name="lfm2",
        known_by=("<|tool_call_start|>",),
        fields=_python(open="<|tool_call_start|>", close="<|tool_call_end|>"),
        form=CallForm(
            begin="<|tool_call_start|>[",
            call=("", "(", ")"),
            between=", ",
            end="]<|tool_call_end|>",
            arguments=_KEYWORD,
        ),
    ),
    Dialect(
        name="olmo3",
        known_by=("<function_calls>",),
        fields=_python(open="<function_calls>", close="</function_calls>"),
        form=CallForm(
            begin="<function_calls>",
            call=("", "(", ")"),
            between="\n",
            end="</function_calls>",
            arguments=_KEYWORD,
        ),
    ),
    Dialect(
        name="phi4_mini",
        known_by=("<|tool_call|>", "<|/tool_call|>"),
        fields=_json(open_pattern=r"<\|tool_call\|>|functools(?=\[)", close="<|/tool_call|>"),
        form=CallForm(begin="<|tool_call|>[", call=_OBJECT, between=", ", end="]<|/tool_call|>"),
    ),
    Dialect(
        name="granite",  # 3; 4 speaks hermes
        known_by=("<|tool_call|>",),
        fields=_json(open="<|tool_call|>"),
        form=CallForm(begin="<|tool_call|>[", call=_OBJECT, between=", ", end="]"),
    ),
    Dialect(
        name="cohere",
        known_by=("<|START_ACTION|>",),
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
        fields={
            "response": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "repeats": True},
            **_json(open="<|START_ACTION|>", close="<|END_ACTION|>"),
        },
        form=CallForm(
            begin="<|START_ACTION|>[\n",
            call=('    {"tool_call_id": "{n}", "tool_name": "', '", "parameters": ', "}"),
            between=",\n",
            end="\n]<|END_ACTION|>",
        ),
    ),
    Dialect(
        name="nemotron_json",
        known_by=("<TOOLCALL>",),
        fields=_json(open="<TOOLCALL>", close="</TOOLCALL>"),
        form=CallForm(begin="<TOOLCALL>[", call=_OBJECT, between=", ", end="]</TOOLCALL>"),
    ),
    Dialect(
        name="hunyuan",
        known_by=("<tool_calls>", "<tool_call>", "```json"),
        fields=_json(
            open_pattern=r"(?:<tool_calls>\s{0,8}+)?<tool_call>(?:function<tool_sep>)?\s{0,8}+"
            r"(?P<name>[^\s`<]{1,256}+)\s{0,8}+```json\s{0,8}+",
            close_pattern=r"\s{0,8}+```\s{0,8}+</tool_call>",
            end="</tool_calls>",
        ),
        form=CallForm(
            begin="<tool_calls>\n",
            call=("<tool_call>", "\n```json\n", "\n```</tool_call>"),
            between="\n",
            end="\n</tool_calls>",
        ),
    ),
    Dialect(
        name="jamba",
        known_by=("<tool_calls>",),
        fields=_json(open="<tool_calls>", close="</tool_calls>"),
        form=CallForm(begin="<tool_calls>[\n    ", call=_OBJECT, between=",\n    ", end="\n]</tool_calls>"),
    ),
    Dialect(
        name="internlm",
        known_by=("<|action_start|>", "<|plugin|>"),
        fields=_json(open_pattern=r"<\|action_start\|>\s{0,8}+<\|plugin\|>", close="<|action_end|>"),
        form=CallForm(
            call=('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>"), between="\n"
        ),
    ),
    Dialect(
        name="hermes",  # Qwen 2.5 and 3, SmolLM3, Granite 4 and many others
        known_by=("<tool_call>",),
        fields=_json(open="<tool_call>", close="</tool_call>"),
        form=CallForm(
            call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
            between="\n",
        ),
    ),
    Dialect(
        name="pythonic",  # Llama 3.2 and others that are asked to write a list of calls and nothing else
        fields=_python(open_pattern=r"(?:\A|(?<=</think>))\s{0,8}+(?:<\|python_tag\|>)?\[(?=\w[\w.]*\()"),
        form=CallForm(begin="[", call=("", "(", ")"), between=", ", end="]", arguments=_KEYWORD),
    ),
)

DIALECTS: dict[str, Dialect] = {each.name: each for each in _DIALECTS}
"""in the order in which a chat template is compared with them"""

THINKING_ONLY = Dialect(name="thinking")
PLAIN = Dialect(name="none", thinking=None)

ALIASES = {
    # vLLM's names for parsers of calls
    "deepseek_r1": "deepseek_v3",
    "glm47": "glm45",
    "gpt_oss": "harmony",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
    "qwen3_xml": "qwen3_coder",
}
