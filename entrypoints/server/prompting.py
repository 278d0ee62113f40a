"""From a conversation to what the engine makes of it: rendered, measured, and generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine import AsyncEngine, SamplingParams
from engine.frontend.texts import too_many_tokens
from entrypoints.server.answers import Answers
from entrypoints.server.context import Outputs, Queued, ServerContext


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = False

    async def render(self, engine: AsyncEngine) -> tuple[str, list[int]]:
        """Text and token ids. Raises `InvalidRequestError`, also for what is no message."""
        return await engine.render_chat(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=self.tools or None,
            template_kwargs=self.template_kwargs,
            add_special_tokens=self.add_special_tokens,
        )

    def answer_so_far(self) -> str:
        """The last message, if it is the assistant's own. The conversation has been rendered, so it is a message."""
        message = self.messages[-1]
        content = message.get("content")
        if message.get("role") != "assistant" or content is None:
            return ""
        if isinstance(content, str):
            return content
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)


async def outputs_of(
    context: ServerContext,
    asked: Conversation,
    params: SamplingParams,
    answers: Answers,
    body: Queued,
    request_id: str,
    *,
    delta: bool,
    before: Sequence[int] = (),
) -> Outputs:
    """`before`: token ids that the conversation goes on from. Raises `InvalidRequestError`."""
    if answers.reads:
        await context.speech.load_reader()
    text, token_ids = await asked.render(context.engine)
    token_ids = behind(before, token_ids, context.engine.model.bos_token_id)
    if len(token_ids) >= context.engine.max_model_len and params.truncate_prompt_tokens is None:
        raise too_many_tokens(len(token_ids), context.engine.max_model_len, "messages")
    continued = asked.answer_so_far() if asked.continue_final_message else ""
    prepared = answers.prepare(params, text, continued)
    prompt = {"prompt": text, "prompt_token_ids": token_ids}
    return context.generate(prompt, prepared, body, request_id, delta=delta)


def behind(before: Sequence[int], ids: list[int], bos: int | None) -> list[int]:
    """A text begins once."""
    return [*before, *(ids[1:] if before and ids[:1] == [bos] else ids)]
