"""Dialects whose calls hold their arguments one by one: between tags, or as keywords of Python."""

from __future__ import annotations

from engine.dialects.fields import python_calls, tagged_calls
from engine.dialects.forms import CallForm, Dialect, Tagged

_KEYWORD = Tagged("{key}={value}", joined=", ", texts="json", python=True, nested="'{key}': {value}")
_FUNCTION = Tagged("<parameter={key}>\n{value}\n</parameter>\n")

TAGGED_FAMILIES = (
    *(
        Dialect(
            name=name,
            known_by=("｜DSML｜", f"{block}>"),
            fields=tagged_calls(
                r'<｜DSML｜parameter name="(?P<key>[^"]+)"[^>]*+>(?P<value>.*?)</｜DSML｜parameter>',
                ("<｜DSML｜parameter", "</｜DSML｜parameter>"),
                open_pattern=r"(?:<｜DSML｜(?:function|tool)_calls>\s{0,8}+)?"
                r'<｜DSML｜invoke name="(?P<name>[^"<>\n]{1,256}+)">',
                close="</｜DSML｜invoke>",
                end=f"</｜DSML｜{block}>",
            ),
            form=CallForm(
                begin=f"<｜DSML｜{block}>\n",
                call=('<｜DSML｜invoke name="', '">\n', "{s}</｜DSML｜invoke>\n"),
                end=f"</｜DSML｜{block}>",
                arguments=Tagged('<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n'),
            ),
        )
        for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    Dialect(
        name="minicpm5",
        known_by=("<function name=", "<param name="),
        fields=tagged_calls(
            r'<param name="(?P<key>[^"]+)">(?:<!\[CDATA\[)?(?P<value>.*?)(?:\]\]>)?</param>',
            ('<param name="', "</param>"),
            open_pattern=r'<function name="(?P<name>[^"<>\n]{1,256}+)">',
            close="</function>",
        ),
        form=CallForm(
            call=('<function name="', '">', "</function>"),
            between="\n",
            arguments=Tagged('<param name="{key}">{value}</param>'),
        ),
    ),
    Dialect(
        name="minimax_m2",
        known_by=("<minimax:tool_call>",),
        fields=tagged_calls(
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
        fields=tagged_calls(
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
        fields=tagged_calls(
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            ("<parameter=", "</parameter>"),
            open_pattern=r"(?:<tool_call>\s{0,8}+)?<function=(?P<name>[^>\n]{1,256}+)>",
            close="</function>",
            end="</tool_call>",
        ),
        form=CallForm(
            call=("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"), between="{s}", arguments=_FUNCTION
        ),
    ),
    Dialect(
        name="glm45",  # and 4.6, 4.7
        known_by=("<arg_key>", "<arg_value>"),
        fields=tagged_calls(
            r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            ("<arg_value>", "</arg_value>"),
            open_pattern=r"<tool_call>\s{0,8}+(?P<name>[^\s<]{1,256}+)\s{0,8}+",
            close="</tool_call>",
        ),
        form=CallForm(
            call=("<tool_call>", "{s}", "</tool_call>"),
            between="{s}",
            arguments=Tagged("<arg_key>{key}</arg_key>{s}<arg_value>{value}</arg_value>{s}"),
        ),
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
            arguments=Tagged("{key}:{value}", joined=",", texts=('<|"|>',), nested="{key}:{value}", in_order=True),
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
            arguments=Tagged("{key}:{value}", joined=",", texts=("<escape>",), nested="{key}:{value}", in_order=True),
        ),
    ),
)

PYTHON_FAMILIES = (
    Dialect(
        name="llama4_pythonic",
        known_by=("<|python_start|>",),
        fields=python_calls(open="<|python_start|>", close="<|python_end|>"),
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
        also_by=("<|tool_list_start|>",),
        fields=python_calls(open="<|tool_call_start|>", close="<|tool_call_end|>"),
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
        fields=python_calls(open="<function_calls>", close="</function_calls>"),
        form=CallForm(
            begin="<function_calls>",
            call=("", "(", ")"),
            between="\n",
            end="</function_calls>",
            arguments=_KEYWORD,
        ),
    ),
    Dialect(
        name="pythonic",  # Llama 3.2 and others that are asked to write a list of calls and nothing else
        known_by=("[func_name1(",),
        fields=python_calls(open_pattern=r"(?:\A|(?<=</think>))\s{0,8}+(?:<\|python_tag\|>)?\[(?=\w[\w.]*\()"),
        form=CallForm(begin="[", call=("", "(", ")"), between=", ", end="]", arguments=_KEYWORD),
    ),
)
