"""The tokenizer gives transformers' ids and prompts, for directories and GGUF files, and refuses with a field."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_front import Front, save_model

from engine.errors import ConfigError, InvalidRequestError
from engine.frontend.demo import demo_model_path
from engine.frontend.tokenizer import Tokenizer

TEXTS = ["hello world", "  the lazy  dog\n", "", "😀 é </s> x", "1234567890"]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    try:
        path = demo_model_path()
    except ConfigError as error:
        pytest.skip(str(error))
    return Tokenizer.load(path)


@pytest.mark.parametrize("special", [True, False])
def test_ids_equal_transformers(front: Front, special: bool) -> None:
    tokenizer = front.tokenizer
    expected = [tokenizer.hf(t, add_special_tokens=special).input_ids for t in TEXTS]
    assert [tokenizer.encode(t, add_special_tokens=special) for t in TEXTS] == expected
    assert tokenizer.encode_batch(TEXTS, add_special_tokens=special) == expected
    assert [asyncio.run(tokenizer.encode_async(t * 300, add_special_tokens=special)) for t in TEXTS] == [
        tokenizer.encode(t * 300, add_special_tokens=special) for t in TEXTS
    ]


def test_many_threads_may_encode_at_once(front: Front) -> None:
    texts = [f"hello {i} " * 50 for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(front.tokenizer.encode, texts)) == [front.tokenizer.encode(t) for t in texts]


def test_truncation_saved_with_the_tokenizer_has_no_effect(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "truncating"
    shutil.copytree(tiny_model, path)
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.save(str(path / "tokenizer.json"))
    assert len(Tokenizer.load(str(path)).encode("hello world and the dog")) > 3


def test_chat_templates_equal_transformers(front: Front) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    tokenizer = front.tokenizer
    assert tokenizer.apply_chat_template(messages) == "<|user|>hi</s><|assistant|>yes</s><|assistant|>"
    continued = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<|user|>hi</s><|assistant|>yes"
    assert (
        tokenizer.apply_chat_template(messages, chat_template="{{ messages|length }}{{ x }}", template_kwargs={"x": 7})
        == "27"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert tokenizer.apply_chat_template(parts, add_generation_prompt=False) == "<|user|>a\nb</s>"


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([], {}, "messages"),
        ([{"content": "no role"}], {}, "messages"),
        ([{"role": "forbidden", "content": "x"}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "messages"),
        ([{"role": "user", "content": 5}], {}, "messages"),
        ([{"role": "user", "content": "x"}], {"chat_template": "{% for %}"}, "chat_template"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(
    front: Front, messages: list[Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        front.tokenizer.apply_chat_template(messages, **options)
    assert caught.value.field == field


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(save_model(tmp_path / "plain", chat_template=None)))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["missing", "empty", "notes.txt"])
def test_what_holds_no_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("not a model")
    with pytest.raises(ConfigError, match=name):
        Tokenizer.load(str(tmp_path / name))


def test_a_gguf_file_brings_its_tokenizer_and_template(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    text = "The capital of France is Paris, 1889 😀."
    ids = demo.encode(text)
    assert ids == demo.hf(text).input_ids
    assert demo.decode(ids) == text
    prompt = demo.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert demo.decode(demo.encode(prompt, add_special_tokens=False), skip_special_tokens=False) == prompt
    assert demo.eos_token_id == demo.encode("<|im_end|>")[0]
