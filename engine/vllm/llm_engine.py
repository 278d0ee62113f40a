"""vLLM's `LLMEngine`: requests are added, and the engine is turned step by step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from engine.adapters.request import LoRARequest
from engine.config import EngineArgs, ModelConfig
from engine.core.wire import ResetPrefixCache
from engine.errors import ShutDownError
from engine.frontend.admission import Prompt, parse_prompt
from engine.frontend.failures import fails_alone
from engine.frontend.texts import check_name
from engine.replicas.choice import local_client, process_client
from engine.request import RequestOutput, SamplingParams
from engine.session import Session, open_session
from engine.stepping import Stepper
from engine.vllm.metrics import Metric, metrics_of
from engine.vllm.offline import refuse

if TYPE_CHECKING:
    import transformers


class LLMEngine:
    """One thread at a time. What an `LLM` runs meanwhile (it has one, `llm_engine`) is its own."""

    def __init__(self, session: Session, stepper: Stepper) -> None:
        self._session = session
        self._stepper = stepper

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: None = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """`enable_multiprocessing`: with a process of its own for the core. `usage_context` has no effect: nothing is
        reported. Raises `ConfigError` and the like."""
        session = open_session(engine_args, process_client if enable_multiprocessing else local_client)
        return cls(session, Stepper(session))

    @property
    def model_config(self) -> ModelConfig:
        return self._session.config.model

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def get_tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        return self._session.tokenizer.hf

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: object = None,
        trace_headers: object = None,
        priority: int = 0,
    ) -> str:
        """Returns the id. `arrival_time` has no effect: it is now. Raises `InvalidRequestError`, and `ShutDownError`
        behind `shutdown`."""
        refuse(tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
        session = self._session
        if session.closed:
            raise ShutDownError("this engine was shut down")
        name = check_name(request_id, "request_id", session.config.limits)
        parsed = parse_prompt(prompt)
        given = params if params is not None else session.default_sampling_params()
        token_ids = parsed.token_ids
        if token_ids is None:
            text = session.text_of(parsed, given)
            with fails_alone("tokenizing"):
                token_ids = session.tokenizer.encode(text)
        admitted = session.admit(name, parsed, token_ids, given, priority=priority, lora_request=lora_request)
        self._stepper.add(admitted, time.monotonic(), admitted.params.output_kind)
        return name

    def step(self) -> list[RequestOutput]:
        """The outputs of those requests that the next step brought news of; [] where none is unfinished. One that
        failed has finish_reason "error". Raises `CoreDiedError`."""
        return self._stepper.take_kept() or self._stepper.step()

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Those count whose last output has not been given out."""
        return len(self._stepper) + self._stepper.num_kept

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """They have no further outputs. Unknown ids are ignored."""
        self._stepper.drop([request_ids] if isinstance(request_ids, str) else request_ids)

    def reset_prefix_cache(self) -> bool:
        self._session.client.send(ResetPrefixCache())
        return True

    def get_metrics(self) -> list[Metric]:
        return metrics_of(self._session.metrics.registry)

    def shutdown(self) -> None:
        """Free the model and its memory; idempotent."""
        self._session.close()
