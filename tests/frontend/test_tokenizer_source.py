"""A tokenizer that was converted once and kept is transformers' own, and is made anew when its files change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_front import save_model

from engine.errors import ConfigError
from engine.frontend import tokenizer_source
from engine.frontend.demo import demo_model_path
from engine.frontend.tokenizer import Tokenizer
from engine.frontend.tokenizer_source import describe_tokenizer
from engine.models.bounds import TOKENIZER_BYTES

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SPECIAL += ["  ", "\n\n", "é", "e\u0301", "你好", "😀", "\u2581", "'s", "12345"]
TEXTS = st.lists(st.sampled_from(SPECIAL) | st.text(max_size=12), max_size=8).map("".join)


@pytest.fixture(scope="module", autouse=True)
def converted_in_a_child(converted_here: Callable[[str], bytes]) -> Iterator[None]:
    """As by a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_source, "_convert", converted_here)
        yield


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
    shutil.copytree(path, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    describe_tokenizer(str(tmp_path / "elsewhere"), cache)
    assert len(conversions) == 2, "the same files are the same tokenizer"
    for entry in kept(cache):
        entry.write_bytes(entry.read_bytes()[:100])
    describe_tokenizer(str(path), cache)
    assert len(conversions) == 3


def test_an_entry_that_does_not_verify_is_made_again(tmp_path: Path, conversions: list[str]) -> None:
    """Also one that is whole JSON: a vocabulary without its last words, what was made of another model."""
    path, cache = str(save_model(tmp_path / "tiny")), tmp_path / "cache"
    expected = describe_tokenizer(path, cache)
    [entry] = kept(cache)
    describe_tokenizer(str(save_model(tmp_path / "other", chat_template="another")), cache)
    [foreign] = [file for file in kept(cache) if file != entry]
    whole, other = entry.read_bytes(), foreign.read_bytes()
    seal, _, content = whole.partition(b"\n")
    damaged = msgspec.json.decode(content)
    damaged["backend"] = json.dumps({**json.loads(damaged["backend"]), "added_tokens": []})
    for wrong in (
        seal + b"\n" + msgspec.json.encode(damaged),
        msgspec.json.encode(damaged),  # as it was kept before entries had seals
        other,
        other.partition(b"\n")[0] + b"\n" + content,
        content,
        seal,
        b"[" * 100_000 + b"\n",
        b"",
    ):
        entry.write_bytes(wrong)
        conversions.clear()
        assert describe_tokenizer(path, cache) == expected
        assert conversions == [path] and entry.read_bytes() == whole
    conversions.clear()
    assert describe_tokenizer(path, cache) == expected and not conversions


def test_no_entry_is_loaded_from_a_directory_that_others_may_write(
    tmp_path: Path, conversions: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = str(save_model(tmp_path / "tiny")), tmp_path / "cache"
    before = os.umask(0o002)
    try:
        describe_tokenizer(path, cache)
    finally:
        os.umask(before)
    for folder in (cache, cache / "tokenizers"):
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o770)
        conversions.clear()
        describe_tokenizer(path, cache)
        assert conversions == [path] and f"{folder} is writable by others" in caplog.text
        folder.chmod(0o700)
    conversions.clear()
    describe_tokenizer(path, cache)
    assert not conversions


class PanicError(BaseException):
    """As Rust libraries raise it: beside Exception."""


@pytest.mark.parametrize("error", [PanicError("index out of range"), RecursionError(), TypeError("a\nb")])
def test_whatever_libraries_raise_about_a_tokenizer_is_one_line_that_names_it(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def broken(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", broken)
    with pytest.raises(ConfigError, match=r"no tokenizer can be loaded from .*tiny") as refused:
        describe_tokenizer(str(save_model(tmp_path / "tiny")), None)
    assert "\n" not in str(refused.value)


def test_absurd_tokenizer_files_are_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path / "tiny")
    whole = (path / "tokenizer.json").read_text()
    for text in ("[" * 100_000, "{}", "[]", whole[:1000], json.dumps({**json.loads(whole), "model": {"type": "BPE"}})):
        (path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"no tokenizer can be loaded from .*tiny"):
            describe_tokenizer(str(path), None)
    with open(path / "tokenizer.json", "wb") as file:
        file.truncate(TOKENIZER_BYTES + 1)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: has \d+ bytes"):
        describe_tokenizer(str(path), tmp_path / "cache")


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
