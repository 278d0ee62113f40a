"""`LLM`: a batch of prompts in, a list of outputs out. Names and shapes follow vLLM's offline API."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from engine.adapters.request import LoRARequest
from engine.batch_run import Progress, Shown, interrupts_between_steps
from engine.config import EngineArgs, EngineConfig, ModelConfig, make_args
from engine.core.client import CoreClient
from engine.core.wire import CoreStats, ResetPrefixCache
from engine.errors import ConfigError, InvalidRequestError, ShutDownError
from engine.frontend.adapters import adapters_of
from engine.frontend.admission import PROMPT_ONLY, AdmittedRequest, ParsedPrompt, Prompt, naming_prompt, parse_prompt
from engine.frontend.conversation import ChatMessage
from engine.frontend.failures import fails_alone
from engine.pooled_calls import PooledCalls
from engine.pooling import PoolingParams
from engine.replicas.choice import local_client, process_client
from engine.request import RequestOutput, RequestOutputKind, SamplingParams
from engine.session import Session, open_session
from engine.sleeping import is_sleeping, ready_with, sleeper, with_weights
from engine.stepping import Stepper
from engine.vllm.beams import BeamSearchOutput, BeamSearchParams, beams_of, searched
from engine.vllm.llm_engine import LLMEngine
from engine.vllm.metrics import Metric, metrics_of
from engine.vllm.offline import NotHere, check_format, refuse, with_token_ids

if TYPE_CHECKING:
    import transformers

logger = logging.getLogger(__name__)

ClientFactory = Callable[[EngineConfig], CoreClient]


class LLM(PooledCalls, NotHere):
    """A model, loaded and ready. Use it as a context manager, or call `shutdown`, to free its memory at a certain time.

    One thread at a time. With `in_process` the core runs in the calling thread (nothing to start, easy to debug);
    without, in a process of its own, so that tokenizing and detokenizing overlap with the model.
    """

    def __init__(self, model: str | PathLike[str], *, in_process: bool = True, **settings: Any) -> None:
        """`model`: a Hugging Face directory, a GGUF file or a hub's name for either (`engine.hub`). `settings`: those
        of `EngineArgs`. Raises `ConfigError`."""
        self._start(make_args(model, settings), local_client if in_process else process_client)

    @classmethod
    def from_args(
        cls, args: EngineArgs, *, in_process: bool = True, client_factory: ClientFactory | None = None
    ) -> Self:
        """The same from a struct. `client_factory` brings another core (tests, other transports) and overrides
        `in_process`."""
        llm = cls.__new__(cls)
        llm._start(args, client_factory or (local_client if in_process else process_client))
        return llm

    def _start(self, args: EngineArgs, client_factory: ClientFactory) -> None:
        self._args = args
        self._closed = False
        self._calls = 0
        self._session = open_session(args, client_factory)
        self.model, self.config, self.ready = self._session.model, self._session.config, self._session.ready
        self._tokenizer = self._session.tokenizer
        self._stepper = Stepper(self._session)
        self.llm_engine = LLMEngine(self._session, self._stepper)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model

    def get_tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """transformers' own, loaded when it is first asked for; the engine's prompts go another way."""
        return self._tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the recommendation in the model's generation config, else the defaults."""
        return self._session.default_sampling_params()

    def stats(self) -> CoreStats:
        """The core's counters as of its latest step."""
        return self._session.metrics.stats

    def wait_compiled(self) -> None:
        """Return once no compilation goes on behind the serving engine. `generate` does not wait for it: until then
        steps run eagerly, which is slower; benchmarks call this first."""
        self._alive().client.wait_compiled()

    def pin_prefix(self, name: str, prefix: Prompt) -> int:
        """Compute a prefix and keep its KV, whole blocks of it, until `unpin_prefix`: prompts that begin with it start
        behind it, and eviction never takes it. Returns its number of tokens. Raises `InvalidRequestError`."""
        session = self._alive()
        session.pinned.reserve(name)
        try:
            parsed = parse_prompt(prefix)
            [ids] = self._token_ids([parsed], [PROMPT_ONLY])
            admitted = session.admission.admit(
                "pin", parsed.text, ids, PROMPT_ONLY, cache_salt=parsed.cache_salt, pin=name
            )
            [output] = self._run([admitted], time.monotonic(), use_tqdm=False)
            ended = output.outputs[0]
            if ended.finish_reason == "error":
                raise InvalidRequestError(f"the prefix {name!r} was not pinned: {ended.stop_reason}", "prompt")
            return session.pin_completed(name, len(ids), ended)
        except BaseException:
            session.pin_failed(name)
            raise

    def unpin_prefix(self, name: str) -> None:
        """What was pinned is cached like any other prefix from now on. Raises `InvalidRequestError`."""
        self._alive().unpin(name)

    def pinned_prefixes(self) -> dict[str, int]:
        """Names and numbers of tokens."""
        return self._session.pinned.list()

    def sleep(self, level: int = 1) -> None:
        """The core ends: all of its memory is free, and the prefix cache is empty; compiled code and the files of the
        weights stay where they are, so that `wake_up` takes as long as a warm start. Until then `generate` raises
        `EngineError`. `level`: vLLM's, without effect. Raises `ConfigError` while requests run."""
        client = sleeper(self._alive().client)
        if len(self._stepper):
            raise ConfigError("sleep: requests run, and nobody here would wake it up for them")
        client.sleep()
        self._session.begin_anew()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """`tags`: vLLM's, without effect: all of it wakes up."""
        sleeper(self._alive().client).wake_up()

    @property
    def is_sleeping(self) -> bool:
        return is_sleeping(self._alive().client)

    def update_weights(self, path: str | PathLike[str]) -> None:
        """Serve the weights of another checkpoint of the same model from now on; it wakes up, if it slept. Raises
        `ConfigError` and the like for what cannot take their place; then nothing has changed."""
        session = self._alive()
        config = with_weights(self._args, self.model, session.config, str(path))
        sleeper(session.client).change(config)
        session.begin_anew()
        self.config = session.config = config
        self.ready = session.ready = ready_with(session.ready, config)

    def start_profile(self, directory: str | PathLike[str] | None = None, steps: int | None = None) -> None:
        """Record the next steps of the model in `directory` (`profiles`): torch's trace of them, and a table of where
        their time goes. At most `steps`; None: as many as the limit `profile_steps`. Raises `ConfigError` and
        `InvalidRequestError`."""
        self._idle().profiles.start(directory or "profiles", steps)

    def stop_profile(self) -> list[Path]:
        """The profile's files; what has been recorded has been written then. Raises `ConfigError` where nothing was,
        `EngineError` where it could not be written."""
        return self._idle().profiles.stop()

    def _idle(self) -> Session:
        """Raises `ConfigError` while requests run that `llm_engine` was given."""
        if len(self._stepper):
            raise ConfigError("a profile begins and ends between requests: some of llm_engine's run")
        return self._alive()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes before the next request runs."""
        self._alive().client.send(ResetPrefixCache())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: Shown = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs in the order of the prompts. `prompt_token_ids` (vLLM's, of old): in place of
        the prompts' texts, or of the prompts.

        Raises `InvalidRequestError` before anything runs when one prompt or its parameters can not be served. A
        request that fails later, inside the core, fails alone: its output has finish_reason "error" and the cause as
        stop_reason.
        """
        session = self._alive()
        arrival = time.monotonic()
        parsed = with_token_ids(prompts, prompt_token_ids)
        params = self._per_prompt(sampling_params, len(parsed))
        if priority is not None and len(priority) != len(parsed):
            raise InvalidRequestError(f"{len(parsed)} prompts but {len(priority)} priorities", "priority")
        adapters = adapters_of(lora_request, len(parsed))
        call = self._number_call()
        admitted = []
        for i, (prompt, ids) in enumerate(zip(parsed, self._token_ids(parsed, params), strict=True)):
            with naming_prompt(i, len(parsed)):
                urgency = priority[i] if priority is not None else 0
                name, adapter = f"{call}.{i}", adapters[i]
                admitted.append(session.admit(name, prompt, ids, params[i], priority=urgency, lora_request=adapter))
        return self._run(admitted, arrival, use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Shown = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of lists)."""
        self._alive()
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        check_format(chat_template_content_format)
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[ChatMessage]]", [messages] if one or not messages else messages)
        texts = [
            self._tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        for text in texts:
            self._tokenizer.bound.check(text, "messages")
        ids = self._tokenizer.encode_batch(texts, add_special_tokens=False)  # the template wrote them out
        prompts: list[Prompt] = [{"prompt": text, "prompt_token_ids": i} for text, i in zip(texts, ids)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: Shown = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences of each prompt, best first. `concurrency_limit` has no effect: as many run as
        there is room for. Raises as `generate`, and `RequestFailedError` for a search that failed."""
        outputs = self.generate(prompts, searched(params), use_tqdm=use_tqdm, lora_request=lora_request)
        return [beams_of(output, self._tokenizer) for output in outputs]

    def get_metrics(self) -> list[Metric]:
        """What `/metrics` of a server shows, as vLLM's objects."""
        return metrics_of(self._session.metrics.registry)

    def shutdown(self) -> None:
        """Free the model and its memory; idempotent."""
        if not self._closed:
            self._closed = True
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _number_call(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _alive(self) -> Session:
        if self._closed:
            raise ShutDownError("this LLM was shut down")
        return self._session

    def _per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, Sequence) or len(params) != count:
            got = len(params) if isinstance(params, Sequence) else f"a {type(params).__name__} as"
            raise InvalidRequestError(f"{count} prompts but {got} sampling_params", "sampling_params")
        return params

    def _run(self, admitted: list[AdmittedRequest], arrival: float, use_tqdm: Shown) -> list[RequestOutput]:
        """Until all have ended; whatever interrupts this ends those that have not."""
        names = [request.request_id for request in admitted]
        done: dict[str, RequestOutput | None] = dict.fromkeys(names)
        missing = len(done)
        bar = Progress(len(admitted), use_tqdm)
        with interrupts_between_steps() as check_interrupt:
            try:
                for request in admitted:
                    self._stepper.add(request, arrival, RequestOutputKind.FINAL_ONLY)
                while missing:
                    for output in self._stepper.step():
                        if output.request_id not in done:
                            self._stepper.keep(output)
                            continue
                        done[output.request_id] = output
                        missing -= 1
                        bar.update(output)
                    check_interrupt()
            finally:
                bar.close()
                self._stepper.drop(names)
        return [output for output in done.values() if output is not None]

    def _token_ids(
        self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams | PoolingParams]
    ) -> Iterator[list[int]]:
        """Of each, all texts at once. Raises `InvalidRequestError`."""
        texts = []
        for i, prompt in enumerate(prompts):
            if prompt.token_ids is None:
                with naming_prompt(i, len(prompts)):
                    texts.append(self._session.text_of(prompt, params[i]))
        with fails_alone("tokenizing"):
            encoded = iter(self._tokenizer.encode_batch(texts))
        return (next(encoded) if prompt.token_ids is None else prompt.token_ids for prompt in prompts)
