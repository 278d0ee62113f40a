"""Text to token ids and back, and chat templates, for a Hugging Face directory or one GGUF file.

transformers knows which `tokenizers.Tokenizer` is the right one (`tokenizer_source`) and is not needed after that.
Encoding and decoding go straight to that Rust object, which is safe to share between threads; transformers' wrapper is
not (it changes truncation settings on every call).

Templates, and long texts of `encode_async`, are the work of helper processes (`helpers`), which can be ended when it
takes too long or nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import InvalidRequestError, RequestFailedError
from engine.frontend import conversation, long_texts
from engine.frontend.conversation import ChatMessage, RenderAnswer
from engine.frontend.failures import fails_alone
from engine.frontend.helpers import HelperEndedError, Helpers
from engine.frontend.long_texts import EncodeAnswer, EncodeQuestion
from engine.frontend.text_bound import QUICK_CHARS, TextBound
from engine.frontend.texts import check_text, too_many_counted, too_many_tokens
from engine.frontend.tokenizer_source import TokenizerDescription, describe_tokenizer, load_with_transformers
from engine.frontend.turns import Turns
from engine.limits import Limits

if TYPE_CHECKING:
    import tokenizers
    import transformers

_INLINE_CHARS = 512
"""below this, encoding takes less time (about 0.1 ms) than the way to another thread and back"""
_THREAD_CHARS = QUICK_CHARS
"""up to this, a thread; above, a helper process"""
_THREADS = 2
_CHARACTER_S = 1e-6
"""about, for a thread to tokenize"""
_RENDERERS = 4
"""for the model's own template, and as many for templates that callers give"""
_RENDER_PATIENCE_S = 0.1
_SLOW_RENDERERS = 32
"""renderings that took longer and go on at the lowest priority"""
_ENCODERS = 2

_answers = msgspec.msgpack.Decoder(RenderAnswer)
_encodings = msgspec.msgpack.Decoder(EncodeAnswer)


class Tokenizer:
    """Encode, decode and render for one model. All methods may be called from any thread, those that are coroutines
    from one event loop."""

    def __init__(
        self,
        description: TokenizerDescription,
        path: str,
        *,
        limits: Limits = Limits(),  # noqa: B008 (it is frozen)
        max_model_len: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`path`: where it came from. `max_model_len` bounds texts; None: nothing does. `chat_template`: in place of
        the model's own."""
        import tokenizers

        self.backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(description.backend)
        self.vocab_size = description.vocab_size
        self.eos_token_id = description.eos_token_id
        self.tells_texts_apart = description.tells_texts_apart
        self._special_tokens = description.special_tokens
        self._given_template = chat_template
        self._chat_template = description.chat_template if chat_template is None else chat_template
        self._response_template = description.response_template if chat_template is None else None
        self._path = path
        self._limits = limits
        self._max_model_len = max_model_len
        self.bound = TextBound(self.backend, path, limits, max_model_len)
        self._token_texts: dict[int, str] = {}
        self._literal: Tokenizer | None = None
        self._literal_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="tokenizer")
        self._thread_turns = self._turns(_THREADS)
        self._slow_turns = self._turns(_SLOW_RENDERERS)
        self._renderers = self._new_renderers()
        self._given_renderers = self._new_renderers()
        """for templates that callers give: whatever these do, the model's own is rendered beside them"""
        self._encoders = Helpers(
            long_texts.MAKE,
            setup=description.backend.encode,
            memory_bytes=limits.tokenize_bytes,
            turns=self._turns(_ENCODERS),
        )

    def _new_renderers(self) -> Helpers:
        return Helpers(
            conversation.MAKE,
            memory_bytes=self._limits.template_bytes,
            turns=self._turns(_RENDERERS),
            patience_s=_RENDER_PATIENCE_S,
            slow_turns=self._slow_turns,
        )

    def _turns(self, size: int) -> Turns:
        return Turns(size, self._limits.waiting_s, self._limits.message("waiting_s"))

    @classmethod
    def load(
        cls,
        path: str,
        cache_dir: Path | None = None,
        *,
        limits: Limits = Limits(),  # noqa: B008
        max_model_len: int | None = None,
        chat_template: str | None = None,
    ) -> Tokenizer:
        """Load from a directory or a GGUF file. With `cache_dir` what transformers makes of it is kept there, and later
        loads take a tenth of a second. Raises `ConfigError` where neither holds a tokenizer."""
        description = describe_tokenizer(path, cache_dir)
        return cls(description, path, limits=limits, max_model_len=max_model_len, chat_template=chat_template)

    @cached_property
    def hf(self) -> transformers.PreTrainedTokenizerBase:
        """transformers' own tokenizer, loaded when it is first asked for; not safe to share between threads."""
        loaded = load_with_transformers(self._path)
        if self._given_template is not None:
            loaded.chat_template = self._given_template
        return loaded

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [e.ids for e in self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def literal(self, marks: Collection[str] = ()) -> Tokenizer:
        """The same, which reads special tokens within a text as text, and `marks`, which count as special here. It is
        made once (half a second), for the marks of the first call."""
        with self._literal_lock:
            if self._literal is None:
                described = TokenizerDescription.bare(self.backend, self.vocab_size, self.eos_token_id, marks)
                found = Tokenizer(described, self._path, limits=self._limits, max_model_len=self._max_model_len)
                found.backend.encode_special_tokens = True
                self._literal = found
            return self._literal

    @cached_property
    def suffix(self) -> list[int]:
        """Special tokens that it puts behind every text."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
        return whole[starts[0] + len(plain) :] if starts else []

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, field: str = "prompt", max_ids: int | None = None
    ) -> list[int]:
        """Encode without holding up the event loop; being cancelled ends the work.

        Raises `InvalidRequestError` naming `field`, also for more than `max_ids`, and `RequestFailedError`.
        """
        if len(text) > _THREAD_CHARS:
            literal = self.backend.encode_special_tokens
            return await self._encode_elsewhere(EncodeQuestion(text, add_special_tokens, max_ids, literal), field)
        with fails_alone("tokenizing"):
            if len(text) <= _INLINE_CHARS:
                ids = self.encode(text, add_special_tokens=add_special_tokens)
            else:
                [ids] = await self._encode_in_thread([text], add_special_tokens)
        self.check_count(len(ids), max_ids, field)
        return ids

    async def encode_batch_async(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Of a few thousand characters, all together. Raises `RequestFailedError`."""
        if not texts:
            return []
        with fails_alone("tokenizing"):
            return await self._encode_in_thread(texts, add_special_tokens)

    async def _encode_in_thread(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # The batch form lets go of the interpreter lock while it works.
        async with self._thread_turns.of(_CHARACTER_S * sum(map(len, texts))):
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: self.encode_batch(texts, add_special_tokens=add_special_tokens)
            )

    async def _encode_elsewhere(self, question: EncodeQuestion, field: str) -> list[int]:
        try:
            seconds = self._limits.tokenize_s
            reply = await self._encoders.ask_async(msgspec.msgpack.encode(question), seconds)
        except HelperEndedError as error:
            if error.too_slow:
                self._limits.refuse("tokenize_s", field=field)
            if error.too_large:
                self._limits.refuse("tokenize_bytes", field=field)
            raise RequestFailedError(f"tokenizing failed: {error}") from error
        answer = _encodings.decode(reply)
        if answer.error is not None:
            raise RequestFailedError(f"tokenizing failed: {answer.error}")
        self.check_count(answer.count, question.max_ids, field)
        return answer.token_ids()

    def check_count(self, count: int, max_ids: int | None, field: str) -> None:
        """Raises `InvalidRequestError`."""
        if max_ids is None or count <= max_ids:
            return
        longest = self._max_model_len
        if longest is not None and max_ids <= longest:
            raise too_many_tokens(count, longest, field, generates=max_ids < longest)
        raise too_many_counted(count, max_ids, field, self._limits)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids outside the tokenizer's vocabulary contribute nothing (models pad their vocabulary)."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    async def decode_async(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= _INLINE_CHARS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        loop = asyncio.get_running_loop()
        async with self._thread_turns.of(_CHARACTER_S * len(token_ids)):
            texts: list[str] = await loop.run_in_executor(
                self._pool, lambda: self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
            )
        return texts[0]

    def token_text(self, token_id: int) -> str:
        """One token by itself, its leading space included; bytes that are no whole character show as U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            # SentencePiece decoders strip the first space of a text; inside a text the token has one.
            if (self.backend.id_to_token(token_id) or "").startswith("\u2581") and not text.startswith(" "):
                text = " " + text
            self._token_texts[token_id] = text
        return text

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The checkpoint's own (transformers' `utils.chat_parsing`)."""
        return self._response_template

    def chat_template_text(self, with_tools: bool) -> str:
        """The model's own; "" where there is none."""
        try:
            return self._template(None, with_tools)
        except InvalidRequestError:
            return ""

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Render a conversation to the prompt text, special tokens written out (encode it with none added).

        Raises `InvalidRequestError` for messages that the template refuses, for what takes too long or too much
        memory, or where the model has no template.
        """
        question, field = self._question(
            messages, chat_template, add_generation_prompt, continue_final_message, tools, template_kwargs
        )
        try:
            return self._text_of(self._renderers_for(field).ask(question, self._limits.template_s))
        except HelperEndedError as error:
            raise self._not_rendered(error, field) from error

    async def apply_chat_template_async(
        self,
        messages: Sequence[ChatMessage],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """`apply_chat_template` off the event loop; being cancelled ends the rendering."""
        question, field = self._question(
            messages, chat_template, add_generation_prompt, continue_final_message, tools, template_kwargs
        )
        try:
            return self._text_of(await self._renderers_for(field).ask_async(question, self._limits.template_s))
        except HelperEndedError as error:
            raise self._not_rendered(error, field) from error

    def _renderers_for(self, blamed: str) -> Helpers:
        """`blamed`: as `_question` gives it."""
        return self._given_renderers if blamed == "chat_template" else self._renderers

    def start_renderer(self) -> None:
        """In the background, so that the first conversation need not wait for it."""
        if self.has_chat_template:
            with suppress(RequestFailedError):  # who asks first learns why it cannot be started
                self._renderers.start_one()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for each in (self._renderers, self._given_renderers, self._encoders, self._literal):
            if each is not None:
                each.close()

    def _question(
        self,
        messages: Sequence[ChatMessage],
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> tuple[bytes, str]:
        """And the field to name when it takes too long: "chat_template" where the caller gave one."""
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequestError(
                "this model's tokenizer has no chat template: use completions, or give a chat_template", "messages"
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        template = self._template(chat_template, bool(tools))
        blamed = "messages" if chat_template is None else "chat_template"
        question = conversation.question(
            messages,
            template=template,
            blamed=blamed,
            tools=tools,
            template_kwargs=template_kwargs,
            special_tokens=self._special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            max_chars=self.bound.chars(self._limits.template_output_factor),
            limits=self._limits,
        )
        return question, blamed

    def _text_of(self, reply: bytes) -> str:
        answer = _answers.decode(reply)
        if answer.text is None:
            raise InvalidRequestError(answer.error, answer.field, answer.code)
        return answer.text

    def _not_rendered(self, error: HelperEndedError, field: str) -> Exception:
        if error.too_slow:
            return InvalidRequestError(self._limits.message("template_s", field=field), field)
        return RequestFailedError(f"rendering the messages failed: {error}")

    def _template(self, asked: str | None, with_tools: bool) -> str:
        """`asked` may be a template or the name of one of the model's; None: the model's own for the purpose. Raises
        `InvalidRequestError`."""
        own = self._chat_template
        if asked is not None:
            known = own.get(asked) if isinstance(own, dict) else None
            if known is not None:
                return known
            self._limits.check("template_chars", len(check_text(asked, "chat_template")), "chat_template")
            return asked
        if not isinstance(own, dict):
            return own or ""
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in own:
                return own[name]
        raise InvalidRequestError(
            f"the model has no default chat template; give chat_template as one of {', '.join(sorted(own))}",
            "chat_template",
        )
