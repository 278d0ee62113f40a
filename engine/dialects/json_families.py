"""Dialects whose calls hold their arguments as one JSON object."""

from __future__ import annotations

from engine.dialects.fields import JSON, NAMED, json_calls, nothing
from engine.dialects.forms import CallForm, Dialect

_OBJECT = ('{"name": "', '", "arguments": ', "}")

JSON_FAMILIES = (
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
            **json_calls(
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
                **JSON,
                "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s{0,8}+)?<\|tool_call_begin\|>\s{0,8}+"
                r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256}+)(?::\d{1,9}+)?)\s{0,8}+<\|tool_call_argument_begin\|>",
                "close": "<|tool_call_end|>",
                "transform": {"id": "{id}", **NAMED},
            },
            **nothing("<|tool_calls_section_end|>"),
        },
        form=CallForm(
            begin="<|tool_calls_section_begin|>",
            call=("<|tool_call_begin|>functions.", ":{n}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            end="<|tool_calls_section_end|>",
        ),
    ),
    Dialect(
        name="deepseek_v3",  # and R1
        known_by=("<｜tool▁call▁begin｜>", "```json"),
        fields=json_calls(
            open_pattern=r"(?:<｜tool▁calls▁begin｜>\s{0,8}+)?<｜tool▁call▁begin｜>\s{0,8}+function<｜tool▁sep｜>"
            r"(?P<name>[^\n<]{1,256}+)\n```json\s{0,8}+",
            close_pattern=r"\s{0,8}+```\s{0,8}+<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        form=CallForm(
            begin="<｜tool▁calls▁begin｜>",
            call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
            between="{s}",
            end="{s}<｜tool▁calls▁end｜>",
        ),
    ),
    Dialect(
        name="deepseek_v31",
        known_by=("<｜tool▁call▁begin｜>",),
        fields=json_calls(
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
        name="mistral_v11",  # tokenizer versions 11 and 12: Mistral Small 3.2
        known_by=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        thinking=("[THINK]", "[/THINK]"),
        call_ids="nine",
        fields=json_calls(
            open_pattern=r"\[TOOL_CALLS\]\s{0,8}+(?P<name>[^\s\[\]{}]{1,256}+)(?:\[CALL_ID\][^\[]{0,64}+)?\[ARGS\]",
            close_pattern=r"(?=\[TOOL_CALLS\])",
        ),
        form=CallForm(call=("[TOOL_CALLS]", "[CALL_ID]{id}[ARGS]", "")),
    ),
    Dialect(
        name="mistral",  # from tokenizer version 13 on
        known_by=("[TOOL_CALLS]", "[ARGS]"),
        thinking=("[THINK]", "[/THINK]"),
        call_ids="nine",
        fields=json_calls(
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
        fields=json_calls(open="[TOOL_CALLS]"),
        form=CallForm(
            begin="[TOOL_CALLS]{s}[", call=('{"name": "', '", "arguments": ', "{and_id}}"), between=", ", end="]"
        ),
    ),
    Dialect(
        name="llama3_json",
        known_by=('{"name": function name, "parameters":',),
        fields=json_calls(
            open_pattern=r'(?:<\|python_tag\|>\s{0,8}+)?\{\s{0,8}+(?:"type"\s{0,8}+:\s{0,8}+"function"\s{0,8}+,\s{0,8}+)?'
            r'"name"\s{0,8}+:\s{0,8}+"(?P<name>[^"\n]{1,256}+)"\s{0,8}+,'
            r'\s{0,8}+"(?:parameters|arguments)"\s{0,8}+:\s{0,8}+',
            close_pattern=r'\}\s{0,8}+(?:;(?=\s{0,8}+\{)|(?=\{\s{0,8}+"(?:name|type)")|\Z)',
        ),
        form=CallForm(call=('{"name": "', '", "parameters": ', "}"), between="; "),
    ),
    Dialect(
        name="phi4_mini",
        known_by=("<|tool_call|>", "<|/tool_call|>"),
        also_by=("functools[",),
        fields=json_calls(open_pattern=r"<\|tool_call\|>|functools(?=\[)", close="<|/tool_call|>"),
        form=CallForm(begin="<|tool_call|>[", call=_OBJECT, between=", ", end="]<|/tool_call|>"),
    ),
    Dialect(
        name="granite",  # 3; 4 speaks hermes
        known_by=("<|tool_call|>",),
        fields=json_calls(open="<|tool_call|>"),
        form=CallForm(
            begin="<|tool_call|>{s}[",
            call=('{s}{{s}"name": "', '",{s}"arguments": ', "{s}}"),
            between=",{s}",
            end="{s}]",
        ),
    ),
    Dialect(
        name="cohere",
        known_by=("<|START_ACTION|>",),
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
        fields={
            "response": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "repeats": True},
            **json_calls(open="<|START_ACTION|>", close="<|END_ACTION|>"),
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
        fields=json_calls(open="<TOOLCALL>", close="</TOOLCALL>"),
        form=CallForm(begin="<TOOLCALL>[", call=_OBJECT, between=", ", end="]</TOOLCALL>"),
    ),
    Dialect(
        name="hunyuan",
        known_by=("<tool_calls>", "<tool_call>", "```json"),
        fields=json_calls(
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
        name="apriel",
        known_by=("<tool_calls>", "[BEGIN FINAL RESPONSE]"),
        thinking=("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
        fields=json_calls(open="<tool_calls>", close="</tool_calls>"),
        form=CallForm(begin="<tool_calls>[", call=_OBJECT, between=", ", end="]</tool_calls>"),
    ),
    Dialect(
        name="minimax_m1",
        known_by=("<tool_calls>", "<beginning_of_sentence>"),
        fields=json_calls(open="<tool_calls>", close="</tool_calls>"),
        form=CallForm(begin="<tool_calls>\n", call=_OBJECT, between="\n", end="\n</tool_calls>"),
    ),
    Dialect(
        name="jamba",  # and Hunyuan A13B
        known_by=("<tool_calls>",),
        fields=json_calls(open="<tool_calls>", close="</tool_calls>"),
        form=CallForm(begin="<tool_calls>{s}[{s}", call=_OBJECT, between=",{s}", end="{s}]{s}</tool_calls>"),
    ),
    Dialect(
        name="functionary_v31",
        known_by=("<function=", "</function>"),
        fields=json_calls(open_pattern=r"<function=(?P<name>[^>\n]{1,256}+)>", close="</function>"),
        form=CallForm(call=("<function=", ">", "</function>")),
    ),
    Dialect(
        name="granite_20b_fc",
        known_by=("<function_call>",),
        fields=json_calls(open="<function_call>", close_pattern=r"(?=<function_call>)"),
        form=CallForm(call=('<function_call> {"name": "', '", "arguments": ', "}"), between="\n"),
    ),
    Dialect(
        name="apertus",
        known_by=("<|tools_prefix|>", "<|tools_suffix|>"),
        thinking=("<|inner_prefix|>", "<|inner_suffix|>"),
        fields={
            "tool_calls": {
                **JSON,
                "open": "<|tools_prefix|>",
                "close": "<|tools_suffix|>",
                "transform": {"by_name": "{content}"},
            }
        },
        form=CallForm(begin="<|tools_prefix|>[", call=('{"', '": ', "}"), between=", ", end="]<|tools_suffix|>"),
    ),
    Dialect(
        name="internlm",
        known_by=("<|action_start|>", "<|plugin|>"),
        fields=json_calls(open_pattern=r"<\|action_start\|>\s{0,8}+<\|plugin\|>", close="<|action_end|>"),
        form=CallForm(
            call=('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>"), between="{s}"
        ),
    ),
    Dialect(
        name="hermes",  # Qwen 2.5 and 3, SmolLM3, Granite 4 and many others
        known_by=("<tool_call>",),
        fields=json_calls(open="<tool_call>", close="</tool_call>"),
        form=CallForm(
            call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
            between="{s}",
        ),
    ),
)
