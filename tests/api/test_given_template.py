"""A chat template in place of the model's own: rendered as transformers does, read for dialects, checked first."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_core import EchoCore
from transformers import AutoTokenizer

from engine import LLM, EngineArgs
from engine.errors import ConfigError, InvalidRequestError
from engine.frontend.tokenizer import Tokenizer
from engine.request import SamplingParams
from entrypoints.server.speech import Speech

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools }}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}[assistant] <think></think>{% endif %}"
)
CHAT = [{"role": "user", "content": "hello"}]


def make(model: Path, template: str) -> LLM:
    args = EngineArgs(model=str(model), device="cpu", compile="none", max_model_len=256, chat_template=template)
    return LLM.from_args(args, client_factory=EchoCore)


@pytest.mark.parametrize("as_file", [True, False])
def test_conversations_are_rendered_with_it(tiny_model: Path, tmp_path: Path, as_file: bool) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(tiny_model)
    theirs.chat_template = TEMPLATE
    with make(tiny_model, str(file) if as_file else TEMPLATE) as llm:
        [output] = llm.chat(CHAT, SamplingParams(max_tokens=1), use_tqdm=False)  # type: ignore[arg-type]
        assert output.prompt == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert output.prompt == llm.get_tokenizer().apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=True
        )


def test_dialects_are_found_by_it(tiny_model: Path) -> None:
    own, given = (Speech(Tokenizer.load(str(tiny_model), chat_template=each)).dialect for each in (None, TEMPLATE))
    assert own.thinking is None and given.thinking == ("<think>", "</think>")


def test_its_bounds_are_those_of_templates_that_callers_give(tiny_model: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with make(tiny_model, endless) as llm, pytest.raises(InvalidRequestError, match="template_s"):
        llm.chat(CHAT, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for x in y %}", "does not parse, line 1"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("no-such-file.jinja", "no-such-file.jinja"),
        ("{{ x }}" * 100_000, "262144"),
        ("{{ x\0 }}", "chat_template"),
    ],
)
def test_what_is_no_template_is_refused_before_the_model_is_read(template: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="chat_template") as caught:
        make(Path("no-such-model"), template)
    assert problem in str(caught.value)
