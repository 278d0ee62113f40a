"""Beam search in vLLM's shapes, over the engine's own."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.adapters.request import LoRARequest
from engine.errors import InvalidRequestError, RequestFailedError
from engine.frontend.tokenizer import Tokenizer
from engine.limits import RANGES
from engine.request import LogprobsAt, RequestOutput, SamplingParams, StructuredOutputsParams


class BeamSearchParams(msgspec.Struct, kw_only=False, omit_defaults=True):
    """`temperature` must be 0 or 1: nothing is drawn. The text of a sequence shows its end, whatever
    `include_stop_str_in_output` says, as in vLLM's `LLM.beam_search`. Raises `InvalidRequestError`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        RANGES["n"].check("beam_width", self.beam_width)
        searched(self)


def searched(params: BeamSearchParams) -> SamplingParams:
    """The same for the engine. Sequences that have ended compete until none that goes on can be better, as vLLM has
    it; they are ranked by the tokens that were generated, as in transformers."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequestError(f"params must be BeamSearchParams, got {type(params).__name__}", "params")
    return SamplingParams(
        use_beam_search=True,
        n=params.beam_width,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=params.length_penalty,
        early_stopping="never",
        structured_outputs=params.structured_outputs,
    )


@dataclass
class BeamSearchSequence:
    """`tokens` and `text` begin with the prompt. Log-probabilities of single tokens are not kept."""

    tokens: list[int]
    logprobs: list[LogprobsAt] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass
class BeamSearchOutput:
    """Best first."""

    sequences: list[BeamSearchSequence]


def beams_of(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    """Raises `RequestFailedError` for a search that failed."""
    sequences = []
    for beam in output.outputs:
        if beam.finish_reason == "error":
            raise RequestFailedError(f"beam search of prompt {output.request_id} failed: {beam.stop_reason}")
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                cum_logprob=beam.cumulative_logprob or 0.0,
                text=tokenizer.decode(tokens, skip_special_tokens=False),
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
                lora_request=output.lora_request,
            )
        )
    return BeamSearchOutput(sequences)
