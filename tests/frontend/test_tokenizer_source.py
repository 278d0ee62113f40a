"""A tokenizer that was converted once and kept is transformers' own, and is made anew when its files change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_front import save_model

from engine.errors import ConfigError
from engine.frontend import tokenizer_source
from engine.frontend.demo import demo_model_path
from engine.frontend.tokenizer import Tokenizer
from engine.frontend.tokenizer_source import describe_tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SPECIAL += ["  ", "\n\n", "é", "e\u0301", "你好", "😀", "\u2581", "'s", "12345"]
TEXTS = st.lists(st.sampled_from(SPECIAL) | st.text(max_size=12), max_size=8).map("".join)


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "tokenizers").glob("*"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=["directory", "gguf"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "directory":
        return str(save_model(tmp_path_factory.mktemp("model") / "tiny"))
    try:
        return demo_model_path()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pair(path: str, cache: Path) -> tuple[Tokenizer, Tokenizer]:
    """Converted by a child; loaded from what that kept."""
    return Tokenizer.load(path, cache), Tokenizer.load(path, cache)


@pytest.mark.timeout(200)
def test_random_texts_encode_and_decode_as_in_transformers(pair: tuple[Tokenizer, Tokenizer]) -> None:
    hf = pair[0].hf

    @settings(max_examples=150, deadline=None)
    @given(TEXTS, st.booleans())
    def check(text: str, special: bool) -> None:
        expected = hf(text, add_special_tokens=special).input_ids
        for tokenizer in pair:
            assert tokenizer.encode(text, add_special_tokens=special) == expected
            shown = hf.decode(expected, skip_special_tokens=special, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(expected, skip_special_tokens=special) == shown

    check()


@pytest.mark.timeout(200)
def test_templates_and_facts_are_transformers(pair: tuple[Tokenizer, Tokenizer]) -> None:
    messages = [{"role": "user", "content": "hi é"}, {"role": "assistant", "content": " ok "}]
    for tokenizer in pair:
        hf = tokenizer.hf
        assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (len(hf), hf.eos_token_id)
        for prompt in (True, False):
            expected = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert tokenizer.apply_chat_template(messages, add_generation_prompt=prompt) == expected


@pytest.mark.timeout(200)
def test_what_is_kept_loads_without_transformers_and_torch(
    pair: tuple[Tokenizer, Tokenizer], path: str, cache: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.frontend.tokenizer import Tokenizer\n"
        f"t = Tokenizer.load({path!r}, Path({str(cache)!r}))\n"
        "t.apply_chat_template([{'role': 'user', 'content': 'hi'}]); t.decode(t.encode('hello'))\n"
        "print([m for m in ('transformers', 'torch') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Conversions happen here instead of in a child; the paths that were converted."""
    converted: list[str] = []

    def convert(path: str) -> bytes:
        converted.append(path)
        return msgspec.json.encode(describe_tokenizer(path, None))

    monkeypatch.setattr(tokenizer_source, "_convert", convert)
    return converted


def test_changed_files_and_damaged_entries_are_converted_again(tmp_path: Path, conversions: list[str]) -> None:
    path, cache = save_model(tmp_path / "tiny"), tmp_path / "cache"
    first = describe_tokenizer(str(path), cache)
    assert describe_tokenizer(str(path), cache) == first and len(conversions) == 1
    (path / "chat_template.jinja").write_text("changed {{ messages[0].content }}")
    assert describe_tokenizer(str(path), cache).chat_template == "changed {{ messages[0].content }}"
    assert len(conversions) == len(kept(cache)) == 2
    (path / "model.safetensors").write_bytes(b"weights are no part of it")
    describe_tokenizer(str(path), cache)
    assert len(conversions) == 2
    for entry in kept(cache):
        entry.write_bytes(entry.read_bytes()[:100])
    describe_tokenizer(str(path), cache)
    assert len(conversions) == 3


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, conversions: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    tokenizer = Tokenizer.load(str(save_model(tmp_path / "tiny")), tmp_path / "cache")
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"
    assert "cannot be kept" in caplog.text


@pytest.mark.timeout(200)
def test_the_childs_refusal_is_the_parents(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no tokenizer can be loaded from .*empty"):
        describe_tokenizer(str(tmp_path / "empty"), tmp_path / "cache")
    assert not kept(tmp_path / "cache")


def test_one_of_several_templates_is_chosen_by_name_and_purpose(tmp_path: Path) -> None:
    path = save_model(tmp_path / "tiny", chat_template=None)
    known = describe_tokenizer(str(path), None)
    named = {"default": "d", "tool_use": "t {{ tools | length }}", "rag": "r"}
    tokenizer = Tokenizer(msgspec.structs.replace(known, chat_template=named), str(path))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(chat) == "d"
    assert tokenizer.apply_chat_template(chat, tools=[{"a": 1}]) == "t 1"
    assert tokenizer.apply_chat_template(chat, chat_template="rag") == "r"
    assert tokenizer.apply_chat_template(chat, chat_template="own") == "own"
