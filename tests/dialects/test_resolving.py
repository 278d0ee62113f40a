"""Which dialect a model speaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.dialects.families import ALIASES, DIALECTS
from engine.dialects.resolve import dialect_of, reasoning_parser_names, tool_parser_names
from engine.errors import ConfigError

SHOWN = {
    "hermes": "{% if tools %}<tool_call>\n{}\n</tool_call>{% endif %}",
    "qwen3_coder": "<tool_call>\n<function=name>\n<parameter=key>",
    "glm45": "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "minimax_m2": "<minimax:tool_call>",
    "minimax_m1": "<beginning_of_sentence>ai<tool_calls>\n{}\n</tool_calls>",
    "minicpm5": '<function name="f"><param name="a">',
    "deepseek_v32": "{% set mark = '｜DSML｜' %}<{{ mark }}function_calls>",
    "deepseek_v4": "{% set mark = '｜DSML｜' %}<{{ mark }}tool_calls>",
    "functionary_v31": "<function={{ name }}>{{ arguments }}</function>",
    "granite_20b_fc": "<function_call> {}",
    "apertus": "<|tools_prefix|>[{}]<|tools_suffix|>",
    "apriel": "[BEGIN FINAL RESPONSE]<tool_calls>[]</tool_calls>",
    "mistral_v11": "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments }}",
    "pythonic": "Respond in the format [func_name1(params_name1=params_value1)]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function\n```json\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "mistral_v3": "[TOOL_CALLS][{}]",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary',
    "llama4_pythonic": "<|python_start|>",
    "gemma4": '<|tool_call>call:{{ name }}{<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>",
    "granite": "<|tool_call|>",
    "phi4_mini": "<|tool_call|><|/tool_call|>",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "lfm2": "<|tool_call_start|>",
    "olmo3": "<function_calls>",
    "cohere": "<|START_ACTION|>",
    "seed_oss": "<seed:tool_call><function=",
    "nemotron_json": "<TOOLCALL>",
    "hunyuan": "<tool_calls>\n<tool_call>{{ name }}\n```json\n",
    "jamba": "<tool_calls>",
    "internlm": "<|action_start|><|plugin|>",
    "none": "{{ messages }}",
}


@pytest.mark.parametrize(("name", "template"), SHOWN.items())
def test_a_chat_template_shows_its_dialect(name: str, template: str) -> None:
    assert dialect_of(template).name == name


def test_all_are_shown() -> None:
    assert set(DIALECTS) == set(SHOWN) - {"none"}


def test_other_marks_by_which_some_are_known() -> None:
    assert dialect_of("List of tools: <|tool_list_start|>[").name == "lfm2"
    assert dialect_of("prefix calls with functools[...]").name == "phi4_mini"


def test_nobody_is_taken_for_another() -> None:
    assert dialect_of("]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=").name == "none"


def test_thinking_is_read_where_the_template_knows_of_it() -> None:
    assert dialect_of(SHOWN["hermes"]).thinking is None
    assert dialect_of(SHOWN["hermes"] + "</think>").thinking == ("<think>", "</think>")
    assert dialect_of("{{ messages }}</think>").thinking == ("<think>", "</think>")
    assert dialect_of(SHOWN["mistral"] + "[/THINK]").thinking == ("[THINK]", "[/THINK]")
    assert dialect_of(SHOWN["hermes"] + "</think>", reasoning_parser="none").thinking is None
    assert dialect_of("", reasoning_parser="qwen3").thinking == ("<think>", "</think>")
    assert dialect_of("", reasoning_parser="seed_oss").thinking == ("<seed:think>", "</seed:think>")


def test_every_name_is_taken() -> None:
    for name in tool_parser_names():
        dialect_of("", tool_parser=name)
    for name in reasoning_parser_names():
        dialect_of("", reasoning_parser=name)
    assert set(ALIASES.values()) <= set(DIALECTS)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser must be one of auto, none, deepseek_v32"):
        dialect_of("", tool_parser="nobody's")
    with pytest.raises(ConfigError, match="reasoning_parser must be one of"):
        dialect_of("", reasoning_parser="nobody's")


def test_a_checkpoints_own_template_comes_first(tmp_path: Path) -> None:
    own = {
        "start_anchor": "<a>",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>"},
            "content": {},
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
        },
    }
    found = dialect_of(SHOWN["jamba"], own_template=own)
    assert found.thinking == ("<t>", "</t>") and found.form == DIALECTS["hermes"].form
    assert dialect_of("", own_template=own, tool_parser="glm45").name == "glm45"
    file = tmp_path / "own.json"
    file.write_text(json.dumps(own))
    assert dialect_of("", tool_parser=str(file)).thinking == ("<t>", "</t>")
    file.write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object"):
        dialect_of("", tool_parser=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        dialect_of("", tool_parser=str(tmp_path / "gone.json"))
