"""What a request may blow up is ended: templates that loop or swell, texts that take too long, and whoever left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from compilation.priority import LOWEST
from engine.errors import InvalidRequestError, RequestFailedError
from engine.frontend.helpers import Helper, Helpers
from engine.frontend.text_bound import TextBound
from engine.frontend.tokenizer import Tokenizer
from engine.limits import Limits
from engine.request import StructuredOutputsParams

pytestmark = pytest.mark.timeout(60)
MESSAGES = [{"role": "user", "content": "hi"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LIMITS = Limits(template_s=0.5, tokenize_s=0.5, messages=10, tools=3, template_chars=1000, json_depth=20)
WORDS = "hello world " * 6000


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(str(tiny_model), limits=LIMITS, max_model_len=1024)
    yield tokenizer
    tokenizer.close()


def _idle(helpers: Helpers) -> bool:
    return helpers._turns.free == helpers._turns.size and helpers._turns.waiting == 0


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def refusal(call: Callable[[], object]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    return caught.value


def test_a_helper_is_a_group_of_its_own_in_its_parents_session(tokenizer: Tokenizer) -> None:
    """In a session of its own it would weigh as much as the core."""
    asyncio.run(tokenizer.apply_chat_template_async(MESSAGES))
    [helper, *_] = tokenizer._renderers._idle
    assert os.getpgid(helper.pid) == helper.pid
    assert os.getsid(helper.pid) == os.getsid(0)


def test_one_with_a_low_priority_is_a_session_of_its_own() -> None:
    """Its niceness would mean nothing to the core elsewhere."""
    helper = Helper("engine.grammars.checking:checker", b"", 1 << 30, priority=7)
    try:
        assert os.getsid(helper.pid) == helper.pid
        assert _share(helper.pid) == 7
    finally:
        helper.end()


def _share(pid: int) -> int:
    """The niceness of its session, or its own where sessions have none (containers)."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except OSError:
        return os.getpriority(os.PRIO_PROCESS, pid)


def test_a_priority_that_the_kernel_does_not_take_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def lower(pid: int, niceness: int) -> bool:
        told.append(niceness)
        return len(told) > 1

    monkeypatch.setattr("engine.frontend.helpers.lower_session", lower)
    helper = Helper("engine.grammars.checking:checker", b"", 1 << 30, priority=7)
    try:
        for _ in range(2):
            helper.ask(msgspec.msgpack.encode(StructuredOutputsParams(regex="a")), 30)
    finally:
        helper.end()
    assert told == [7, 7]


def test_a_helper_that_takes_long_gives_way_to_everything(tokenizer: Tokenizer) -> None:
    async def run() -> int:
        slow = asyncio.create_task(tokenizer.apply_chat_template_async(MESSAGES, chat_template=LOOP))
        shares = 0
        while not slow.done():
            await asyncio.sleep(0.01)
            for child in psutil.Process().children():
                with suppress(OSError):  # it has ended
                    shares = max(shares, os.getpriority(os.PRIO_PROCESS, child.pid))
        with pytest.raises(InvalidRequestError):
            await slow
        return shares

    assert asyncio.run(run()) == LOWEST


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOP, "template_s"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{{ '%1000000000d' % 1 }}", "template_bytes"),
        ("{{ 'a' * 10**10 }}", "template_bytes"),
        ("{% for i in range(99999) %}aaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}", "template_output_factor"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deep"),
        ("{% for %}", "parse"),
        ("{{ '\\ud83d' }}", "surrogate"),
        ("x" * 1001, "template_chars"),
        ("\ud83d", "surrogate"),
    ],
)
def test_a_hostile_template_is_refused_and_the_next_is_served(tokenizer: Tokenizer, template: str, says: str) -> None:
    error = refusal(lambda: tokenizer.apply_chat_template(MESSAGES, chat_template=template))
    assert says in str(error), error
    assert error.field in ("chat_template", "messages")
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == "<|user|>hi</s>"


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        (5, {}, "messages"),
        ("hello", {}, "messages"),
        ([5], {}, "messages"),
        ([{1: "x"}], {}, "messages"),
        ([{"role": 5, "content": "x"}], {}, "messages"),
        ([{"role": "\ud83d", "content": "x"}], {}, "messages"),
        ([{"role": "user", "content": "\ud83d"}], {}, "messages"),
        ([{"role": "user", "content": "x", "\ud83d": 1}], {}, "messages"),
        ([{"role": "user", "content": 5}], {}, "messages"),
        ([{"role": "user", "content": [5]}], {}, "messages"),
        ([{"role": "user", "content": "x", "extra": nested(30)}], {}, "messages"),
        ([{"role": "user", "content": "x", "extra": nested(600)}], {}, "messages"),
        ([{"role": "user", "content": "x", "extra": nested(100_000)}], {}, "messages"),
        ([{"role": "user", "content": "x", "extra": 10**30}], {}, "messages"),
        ([{"role": "user", "content": "x" * 2_000_000}], {}, "messages"),
        (MESSAGES * 11, {}, "messages"),
        (MESSAGES, {"tools": [{}] * 4}, "tools"),
        (MESSAGES, {"tools": 5}, "tools"),
        (MESSAGES, {"tools": [5]}, "tools"),
        (MESSAGES, {"template_kwargs": {"messages": 5}}, "chat_template_kwargs"),
        (MESSAGES, {"template_kwargs": {"add_generation_prompt": 5}}, "chat_template_kwargs"),
        (MESSAGES, {"template_kwargs": {"x": nested(600)}}, "chat_template_kwargs"),
        (MESSAGES, {"template_kwargs": {"x": "\ud83d"}}, "chat_template_kwargs"),
        (MESSAGES, {"template_kwargs": {5: 5}}, "chat_template_kwargs"),
        (MESSAGES, {"template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_messages_that_are_none_are_refused_by_field(
    tokenizer: Tokenizer, messages: Any, options: dict[str, Any], field: str
) -> None:
    assert refusal(lambda: tokenizer.apply_chat_template(messages, **options)).field == field


@pytest.mark.parametrize("name", ["self", "loop", "caller", "not a name", "__class__"])
def test_any_other_variable_may_be_given(tokenizer: Tokenizer, name: str) -> None:
    rendered = tokenizer.apply_chat_template(MESSAGES, template_kwargs={name: 5}, add_generation_prompt=False)
    assert rendered == "<|user|>hi</s>"


def test_whoever_leaves_ends_the_work_and_frees_its_place(tokenizer: Tokenizer) -> None:
    """More than there are helpers: those that wait for a turn leave, too."""

    async def body() -> None:
        slow = [
            asyncio.create_task(tokenizer.apply_chat_template_async(MESSAGES, chat_template=LOOP)) for _ in range(40)
        ]
        await asyncio.sleep(0.05)
        for task in slow:
            task.cancel()
        texts = await asyncio.gather(
            *(tokenizer.apply_chat_template_async(MESSAGES, add_generation_prompt=False) for _ in range(20))
        )
        assert texts == ["<|user|>hi</s>"] * 20
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*slow, return_exceptions=True))
        assert _idle(tokenizer._renderers) and _idle(tokenizer._given_renderers)

    asyncio.run(body())


def test_whoever_leaves_frees_the_tokenizer(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        abandoned = [asyncio.create_task(tokenizer.encode_async("é" * 5_000_000)) for _ in range(10)]
        await asyncio.sleep(0.05)
        for task in abandoned:
            task.cancel()
        results = await asyncio.gather(*abandoned, return_exceptions=True)
        assert [type(r) for r in results] == [asyncio.CancelledError] * 10
        assert _idle(tokenizer._encoders)
        assert await tokenizer.encode_async("x" * 2000) == tokenizer.encode("x" * 2000)

    asyncio.run(body())


def test_a_looping_template_holds_up_no_event_loop_and_is_refused(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        looping = [
            asyncio.create_task(tokenizer.apply_chat_template_async(MESSAGES, chat_template=LOOP)) for _ in range(5)
        ]
        results = await asyncio.gather(*looping, return_exceptions=True)
        assert [getattr(r, "field", r) for r in results] == ["chat_template"] * 5

    asyncio.run(body())


def test_who_is_quick_does_not_wait_for_twenty_that_loop_in_the_same_template(tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(str(tiny_model), limits=Limits(template_s=60.0), max_model_len=1024)
    tokenizer._chat_template = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}ok"

    async def body() -> None:
        loop = [{"role": "user", "content": "loop"}]
        looping = [asyncio.create_task(tokenizer.apply_chat_template_async(loop)) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(tokenizer.apply_chat_template_async(MESSAGES), 30) == "ok"
        assert not any(task.done() for task in looping), "a turn was given on while they go on"
        for task in looping:
            task.cancel()
        await asyncio.gather(*looping, return_exceptions=True)
        assert _idle(tokenizer._renderers) and tokenizer._slow_turns.free == tokenizer._slow_turns.size

    asyncio.run(body())
    tokenizer.close()


def test_the_models_own_template_is_rendered_beside_twenty_that_loop(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        looping = [
            asyncio.create_task(tokenizer.apply_chat_template_async(MESSAGES, chat_template=LOOP)) for _ in range(20)
        ]
        await asyncio.sleep(0.05)
        own = await tokenizer.apply_chat_template_async(MESSAGES, add_generation_prompt=False)
        assert own == "<|user|>hi</s>" and not any(task.done() for task in looping[-8:])
        for task in looping:
            task.cancel()
        await asyncio.gather(*looping, return_exceptions=True)

    asyncio.run(body())


def test_a_short_text_does_not_wait_for_a_bodys_hundred_long_ones(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        long = [asyncio.create_task(tokenizer.encode_async("x y" * 21_000)) for _ in range(100)]
        await asyncio.sleep(0)
        short = await tokenizer.encode_async("hello " * 200)
        assert short == tokenizer.encode("hello " * 200) and sum(task.done() for task in long) < 50
        await asyncio.gather(*long)

    asyncio.run(body())


def test_a_helper_that_was_killed_is_replaced(tokenizer: Tokenizer) -> None:
    tokenizer.apply_chat_template(MESSAGES)
    for helper in tokenizer._renderers._idle:
        os.kill(helper.pid, signal.SIGKILL)
        helper._process.wait()
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == "<|user|>hi</s>"


def test_long_texts_are_tokenized_elsewhere_to_the_same_ids(tokenizer: Tokenizer) -> None:
    async def body() -> list[int]:
        return await tokenizer.encode_async(WORDS)

    try:
        ids = asyncio.run(body())
    except InvalidRequestError as error:
        assert "tokenize_s" in str(error)  # a busy machine
    else:
        assert ids == tokenizer.encode(WORDS)
    too_many = refusal(lambda: asyncio.run(tokenizer.encode_async(WORDS, max_ids=1023, field="messages")))
    assert too_many.field == "messages"


def test_a_text_that_takes_too_long_is_ended(tokenizer: Tokenizer, tiny_model: Path) -> None:

    async def body() -> None:
        await tokenizer.encode_async("x" * 70_000)
        [helper] = tokenizer._encoders._idle
        encoding = asyncio.create_task(tokenizer.encode_async("x" * 10_000_000))
        with pytest.raises(InvalidRequestError, match="tokenize_s"):
            await encoding
        assert not helper.alive
        await tokenizer.encode_async("x" * 70_000)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("text", "reason"), [("\ud83d", "surrogate"), (5, "string"), (None, "string"), ("x" * 100_000, "max_model_len")]
)
def test_what_cannot_fit_is_refused_before_it_is_tokenized(tokenizer: Tokenizer, text: Any, reason: str) -> None:
    error = refusal(lambda: tokenizer.bound.check(text))
    assert reason in str(error) and error.field == "prompt"


def test_no_text_that_fits_is_too_long(tokenizer: Tokenizer) -> None:
    """The bound is sound where each character of a text is in a token: as many of the longest token as fit."""
    longest = max(tokenizer.backend.get_vocab(), key=len)
    text = tokenizer.decode([tokenizer.backend.token_to_id(longest)], skip_special_tokens=False) * 1024
    tokenizer.bound.check(text)


@pytest.mark.parametrize(
    ("model", "length"),
    [
        (models.WordPiece({"[UNK]": 0, "ab": 1}, unk_token="[UNK]"), 65536),
        (models.WordLevel({"[UNK]": 0, "ab": 1}, unk_token="[UNK]"), 65536),
        (models.Unigram([("<unk>", 0.0), ("ab", -1.0)], 0, False), 65536),
        (models.BPE({"[UNK]": 0, "a": 1}, [], unk_token="[UNK]", fuse_unk=True), 65536),
        (models.BPE({"[UNK]": 0, "a": 1}, [], unk_token="[UNK]"), 5 * 16),
    ],
    ids=["WordPiece", "WordLevel", "Unigram", "fused", "BPE"],
)
def test_an_unknown_word_is_one_token_whatever_its_length(model: Any, length: int) -> None:
    bound = TextBound(Backend(model), "", Limits(), max_model_len=16)
    assert bound.check("z" * length) == "z" * length
    with pytest.raises(InvalidRequestError, match="context length is 16 tokens"):
        bound.check("z" * (length + 1))
    assert len(bound.cut("z" * 10**6)) == 65536


def test_a_closed_tokenizer_leaves_no_process_behind(tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    tokenizer.apply_chat_template(MESSAGES)
    [helper] = tokenizer._renderers._idle
    tokenizer.close()
    deadline = time.monotonic() + 30
    while helper.alive:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(RequestFailedError, match="closed"):
        tokenizer.apply_chat_template(MESSAGES)
