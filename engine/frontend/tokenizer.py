"""Text to token ids and back, and chat templates, for a Hugging Face directory or one GGUF file.

transformers knows which `tokenizers.Tokenizer` is the right one (`tokenizer_source`) and is not needed after that.
Encoding and decoding go straight to that Rust object, which is safe to share between threads; transformers' wrapper is
not (it changes truncation settings on every call).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequestError
from engine.frontend.tokenizer_source import TokenizerDescription, describe_tokenizer, load_with_transformers

if TYPE_CHECKING:
    import tokenizers
    import transformers

ChatMessage = dict[str, Any]
"""{"role": …, "content": str | list of {"type": "text", "text": …}, …} as in OpenAI's API; templates may read further
keys"""

_INLINE_CHARS = 512
"""below this, encoding takes less time (about 0.1 ms) than the way to another thread and back"""


class Tokenizer:
    """Encode, decode and render for one model. All methods may be called from any thread."""

    def __init__(self, description: TokenizerDescription, path: str) -> None:
        """`path`: where it came from."""
        import tokenizers

        self.backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(description.backend)
        self.vocab_size = description.vocab_size
        self.eos_token_id = description.eos_token_id
        self._special_tokens = description.special_tokens
        self._chat_template = description.chat_template
        self._path = path
        self._token_texts: dict[int, str] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, path: str, cache_dir: Path | None = None) -> Tokenizer:
        """Load from a directory or a GGUF file. With `cache_dir` what transformers makes of it is kept there, and later
        loads take a tenth of a second. Raises `ConfigError` where neither holds a tokenizer."""
        return cls(describe_tokenizer(path, cache_dir), path)

    @cached_property
    def hf(self) -> transformers.PreTrainedTokenizerBase:
        """transformers' own tokenizer, loaded when it is first asked for; not safe to share between threads."""
        return load_with_transformers(self._path)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [e.ids for e in self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode without holding up the event loop."""
        if len(text) <= _INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        # Of the two, only the batch form lets go of the interpreter lock while it works.
        batch = await loop.run_in_executor(
            self._pool, lambda: self.encode_batch([text], add_special_tokens=add_special_tokens)
        )
        return batch[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids outside the tokenizer's vocabulary contribute nothing (models pad their vocabulary)."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    async def decode_async(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= _INLINE_CHARS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        loop = asyncio.get_running_loop()
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

        Raises `InvalidRequestError` for messages that the template refuses, or where the model has no template.
        """
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequestError(
                "this model's tokenizer has no chat template: use completions, or give a chat_template", "messages"
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        conversation = [_plain_message(i, message) for i, message in enumerate(messages)]
        if not conversation:
            raise InvalidRequestError("messages must hold at least one message", "messages")
        import jinja2

        from engine.frontend.chat_template import render

        try:
            rendered = render(
                self._template(chat_template, bool(tools)),
                conversation,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self._special_tokens, **(template_kwargs or {})},
            )
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequestError(f"the chat template does not parse: {error}", "chat_template") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", "messages") from error
        return rendered

    def _template(self, asked: str | None, with_tools: bool) -> str:
        """`asked` may be a template or the name of one of the model's; None: the model's own for the purpose."""
        own = self._chat_template
        if not isinstance(own, dict):
            return asked if asked is not None else own or ""
        if asked is not None:
            return own.get(asked, asked)
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in own:
                return own[name]
        raise ValueError(f"it has no default template; give chat_template as one of {', '.join(sorted(own))}")

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
        """`apply_chat_template` off the event loop (a template is a program: its time is not bounded by its size)."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool,
            lambda: self.apply_chat_template(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
            ),
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _plain_message(index: int, message: ChatMessage) -> ChatMessage:
    """Text parts become one string, joined by newlines, since most templates know only strings."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{index}] must be an object with a role", "messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise InvalidRequestError(f"messages[{index}].content must be a string or a list of text parts", "messages")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
            raise InvalidRequestError(f"messages[{index}].content holds a part that is not text", "messages")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
