"""Chat templates render what transformers renders, for templates in the wild's manner, and stay in their sandbox."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from engine.frontend.chat_template import render

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """{{- bos_token }}
{%- set ns = namespace(first=true, system='') %}
{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content %}{% continue %}{% endif %}
    {%- if loop.index0 > 6 %}{% break %}{% endif %}
    {%- if 'tool_calls' in message %}{{ message.tool_calls | tojson(ensure_ascii=True, sort_keys=True) }}{% endif %}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {%- if message.thinking is defined %}<t>{{ message.thinking }}</t>{% endif %}
    {{ '[' ~ message.role ~ ']' }}{% generation %}{{ message.content | trim }}{% set inner = 1 %}{% endgeneration %}{{ eos_token }}
    {%- set ns.first = false %}
{%- endfor %}
{%- macro end(x) %}<{{ x }}>{% endmacro %}
{{ ns.system }}{{ end(add_generation_prompt) }}{{ dict(a=1, **{'b': 2}).items() | list }}{{ flag | default('none') }}
"""  # noqa: E501
TRIMS = "{% for m in messages %}\n  {% if true %}\n  {{ m.role }}: {{ m.content | trim }}\n  {% endif %}\n{% endfor %}"
ROLES = st.sampled_from(["user", "assistant", "system"])
CALLS = st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
REASONING = {name: st.none() | st.text(max_size=5) for name in ("reasoning_content", "thinking")}
OPTIONAL = {"tool_calls": st.none() | st.lists(CALLS, max_size=2)}
if hasattr(chat_template_utils, "_alias_reasoning_fields"):  # later than transformers 5.17
    OPTIONAL |= REASONING
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=20)}, optional=OPTIONAL), min_size=1, max_size=8
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "wetter_für", "parameters": {"type": "object", "x": [1, 2.5, None]}}}


def transformers_renders(template: str, messages: list[Any], **options: Any) -> str:
    present = [{k: v for k, v in message.items() if v is not None} for message in messages]
    texts, _ = render_jinja_template(conversations=[present], chat_template=template, **options)
    return str(texts[0])


def ours(template: str, messages: list[Any], tools: list[Any] | None = None, **options: Any) -> str:
    known = {"add_generation_prompt": False, "continue_final_message": False}
    flags = {name: options.pop(name, default) for name, default in known.items()}
    return render(template, messages, tools=tools, variables=options, **flags)


@given(MESSAGES, st.booleans(), st.sampled_from([None, [TOOL], [TOOL, TOOL]]))
def test_any_conversation_renders_as_in_transformers(messages: list[Any], prompt: bool, tools: Any) -> None:
    for template in (CHATML, TOOLS, TRIMS):
        options = {"tools": tools, "add_generation_prompt": prompt, **SPECIAL, "flag": 7}
        assert ours(template, messages, **options) == transformers_renders(template, messages, **options)


@given(MESSAGES)
def test_a_continued_message_ends_as_in_transformers(messages: list[Any]) -> None:
    for template in (CHATML, TRIMS):
        try:
            expected = transformers_renders(template, messages, continue_final_message=True)
        except ValueError:
            continue
        assert ours(template, messages, continue_final_message=True) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__base__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    try:
        text = ours(template, [{"role": "user", "content": "x"}])
    except jinja2.TemplateError:
        return
    assert text == "", "jinja2 shows what it hides as nothing"


def test_what_is_no_json_is_shown_by_its_name_only() -> None:
    class Secret:
        def __str__(self) -> str:
            return "the key"

    assert ours("{{ x }}{{ y[0] }}", [{"role": "user"}], x=Secret(), y=(Secret(),)) == "<Secret><Secret>"
