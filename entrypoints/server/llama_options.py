"""Sampling under llama.cpp's names, which Ollama has, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel

from engine import SamplingParams
from engine.request import StructuredOutputsParams
from entrypoints.server.fields import NoEffect, Texts
from entrypoints.server.protocol import NOT_SUPPORTED
from entrypoints.server.structured import blamed_on


class LlamaOptions(BaseModel):
    """`repeat_last_n`: 0 switches the three penalties off; any other number counts all tokens, as without it."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: neutral for name, neutral in NOT_SUPPORTED.items() if name != "repeat_penalty"
    }

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    mirostat_eta: NoEffect = None
    mirostat_tau: NoEffect = None

    def params(
        self,
        defaults: SamplingParams,
        max_tokens: int | None,
        structure: StructuredOutputsParams | None,
        **more: Any,
    ) -> SamplingParams:
        """Where the client says nothing, what the model's authors recommend holds; `more` goes into the parameters.
        Raises `InvalidRequestError`."""
        penalised = self.repeat_last_n != 0
        repetition = defaults.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty
        with blamed_on("repeat_penalty", "repetition_penalty"):
            return SamplingParams(
                temperature=defaults.temperature if self.temperature is None else self.temperature,
                top_k=defaults.top_k if self.top_k is None else max(self.top_k, 0),
                top_p=defaults.top_p if self.top_p is None else self.top_p,
                min_p=defaults.min_p if self.min_p is None else self.min_p,
                repetition_penalty=repetition if penalised else 1.0,
                presence_penalty=(self.presence_penalty or 0.0) if penalised else 0.0,
                frequency_penalty=(self.frequency_penalty or 0.0) if penalised else 0.0,
                seed=None if self.seed == -1 else self.seed,
                max_tokens=max_tokens,
                stop=self.stop,
                structured_outputs=structure,
                **more,
            )
