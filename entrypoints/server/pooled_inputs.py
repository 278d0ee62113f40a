"""The prompts of routes that make vectors of them, or judge them: texts, token ids or a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from engine.errors import InvalidRequestError
from entrypoints.server.context import EnginePrompt, ServerContext
from entrypoints.server.fields import Ids, Objects, Texts, refusal
from entrypoints.server.pooled import PooledFields
from entrypoints.server.prompting import Conversation


class InputFields(PooledFields):
    """Either `input` or `messages`."""

    input: str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)] | None = None
    messages: Objects | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise refusal("input", "give either input or messages")
        return self

    def inputs(self) -> list[str | list[int]]:
        """Raises `InvalidRequestError` where there is none."""
        if not self.input and not isinstance(self.input, str):
            raise InvalidRequestError("input must not be empty", "input")
        return [self.input] if self._is_one else self.input  # type: ignore[list-item,return-value]

    @property
    def _is_one(self) -> bool:
        """A text or its tokens."""
        return isinstance(self.input, str) or bool(self.input and isinstance(self.input[0], int))

    def place(self, index: int) -> str:
        if self.messages is not None:
            return "messages"
        return "input" if self._is_one else f"input[{index}]"

    def conversation(self) -> Conversation:
        return Conversation(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs or {},
            add_special_tokens=bool(self.add_special_tokens),
        )


async def prompts_of(context: ServerContext, body: InputFields, before: str = "") -> list[EnginePrompt]:
    """`before`: what stands before each text. Raises `InvalidRequestError`."""
    engine = context.engine
    if body.messages is not None:
        text, ids = await body.conversation().render(engine)
        return [{"prompt": text, "prompt_token_ids": ids}]
    inputs = body.inputs()
    engine.config.limits.check("prompts", len(inputs), "input")
    prompts: list[EnginePrompt] = []
    for given in inputs:
        if not isinstance(given, str):
            prompts.append({"prompt_token_ids": given})
        elif body.add_special_tokens is False:
            tokenizer, cuts = engine.tokenizer, body.truncate_prompt_tokens is not None
            text = (tokenizer.bound.cut if cuts else tokenizer.bound.check)(before + given, "input")
            ids = await tokenizer.encode_async(text, add_special_tokens=False, field="input")
            prompts.append({"prompt_token_ids": ids})
        else:
            prompts.append(before + given)
    return prompts
