"""`LLM`: a batch of prompts in, a list of outputs out. Names and shapes follow vLLM's offline API."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from engine.batch_run import Progress, interrupts_between_steps
from engine.config import (
    CompileMode,
    Device,
    DType,
    EngineArgs,
    EngineConfig,
    GraphMode,
    KVCacheDType,
    ModelConfig,
    Policy,
    Preemption,
)
from engine.core.client import CoreClient, InProcessClient, ProcessClient
from engine.core.wire import AbortRequests, CoreStats, ResetPrefixCache, UnpinPrefix
from engine.errors import CoreDiedError, EngineError, InvalidRequestError, RequestFailedError
from engine.frontend.admission import (
    PIN_PARAMS,
    Admission,
    AdmittedRequest,
    ParsedPrompt,
    Prompt,
    default_sampling_params,
    parse_prompt,
)
from engine.frontend.conversation import ChatMessage
from engine.frontend.failures import fails_alone
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.pins import PinnedPrefixes
from engine.frontend.texts import check_params, check_text
from engine.frontend.tokenizer import Tokenizer
from engine.limits import MAX_LOGPROBS, MAX_WAITING, limits_of
from engine.request import RequestOutput, SamplingParams
from engine.resolve import resolve_here

logger = logging.getLogger(__name__)

ClientFactory = Callable[[EngineConfig], CoreClient]


class LLM:
    """A model, loaded and ready. Use it as a context manager, or call `shutdown`, to free its memory at a certain time.

    One thread at a time. With `in_process` the core runs in the calling thread (nothing to start, easy to debug);
    without, in a process of its own, so that tokenizing and detokenizing overlap with the model.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: DType = "auto",
        quantization: Literal["auto", "none", "int8", "int4"] = "auto",
        device: Device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_mixed_prefill_tokens: int | None = None,
        max_waiting: int = MAX_WAITING,
        block_size: int | None = None,
        kv_cache_dtype: KVCacheDType = "auto",
        kv_cache_memory: int | str | None = None,
        memory_fraction: float = 0.9,
        enable_prefix_caching: bool = True,
        swap_space: int | str = 0,
        preemption: Preemption = "auto",
        scheduling_policy: Policy = "fcfs",
        async_scheduling: bool | None = None,
        compile: CompileMode = "pieces",
        graphs: GraphMode | None = None,
        attention_backend: str | None = None,
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        seed: int = 0,
        override_generation_config: Mapping[str, object] | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        limits: Mapping[str, float] | None = None,
        cache_dir: str | None = None,
        debug_sync: bool = False,
        load_format: Literal["auto", "dummy"] = "auto",
        served_model_name: str | None = None,
        in_process: bool = True,
    ) -> None:
        """`model`: a Hugging Face directory or a GGUF file. Sizes are bytes, or "4GiB". See `EngineArgs`."""
        given = {name: value for name, value in locals().items() if name not in ("self", "in_process")}
        given["override_generation_config"] = dict(override_generation_config or {})
        given["limits"] = limits_of(limits or {})
        given["cores"] = None if cores is None else tuple(cores)
        args = EngineArgs(**given)
        self._start(args, InProcessClient if in_process else ProcessClient)

    @classmethod
    def from_args(
        cls, args: EngineArgs, *, in_process: bool = True, client_factory: ClientFactory | None = None
    ) -> Self:
        """The same from a struct. `client_factory` brings another core (tests, other transports) and overrides
        `in_process`."""
        llm = cls.__new__(cls)
        llm._start(args, client_factory or (InProcessClient if in_process else ProcessClient))
        return llm

    def _start(self, args: EngineArgs, client_factory: ClientFactory) -> None:
        self._closed = False
        self._calls = 0
        self._stats = CoreStats()
        self.model, self.config = resolve_here(args)
        self._tokenizer = Tokenizer.load(
            self.config.model.tokenizer,
            Path(self.config.compile.cache_dir),
            limits=self.config.limits,
            max_model_len=self.config.model.max_model_len,
        )
        self._admission = Admission(self.config, self._tokenizer)
        self._processor = OutputProcessor(self._tokenizer)
        self._pinned = PinnedPrefixes(self.config.limits)
        self._client = client_factory(self.config)
        self.ready = self._client.start()

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer in use; its `hf` is transformers' object."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the recommendation in the model's generation config, else the defaults."""
        return default_sampling_params(self.model.generation_defaults)

    def stats(self) -> CoreStats:
        """The core's counters as of its latest step."""
        return self._stats

    def wait_compiled(self) -> None:
        """Return once no compilation goes on behind the serving engine. `generate` does not wait for it: until then
        steps run eagerly, which is slower; benchmarks call this first."""
        self._alive().wait_compiled()

    def pin_prefix(self, name: str, prefix: Prompt) -> int:
        """Compute a prefix and keep its KV, whole blocks of it, until `unpin_prefix`: prompts that begin with it start
        behind it, and eviction never takes it. Returns its number of tokens. Raises `InvalidRequestError`."""
        core = self._alive()
        self._pinned.reserve(name)
        try:
            parsed = parse_prompt(prefix)
            [ids] = self._token_ids([parsed])
            admitted = self._admission.admit(
                "pin", parsed.text, ids, PIN_PARAMS, cache_salt=parsed.cache_salt, pin=name
            )
            [output] = self._run([admitted], time.monotonic(), use_tqdm=False)
            if output.outputs[0].finish_reason == "error":
                reason = output.outputs[0].stop_reason
                raise InvalidRequestError(f"the prefix {name!r} was not pinned: {reason}", "prompt")
        except BaseException:
            self._pinned.release(name)
            with suppress(CoreDiedError):
                core.send(UnpinPrefix(name=name))  # the core may have it already
            raise
        return self._pinned.complete(name, len(ids))

    def unpin_prefix(self, name: str) -> None:
        """What was pinned is cached like any other prefix from now on. Raises `InvalidRequestError`."""
        self._pinned.remove(name)
        self._alive().send(UnpinPrefix(name=name))

    def pinned_prefixes(self) -> dict[str, int]:
        """Names and numbers of tokens."""
        return self._pinned.list()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes before the next request runs."""
        self._alive().send(ResetPrefixCache())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs in the order of the prompts.

        Raises `InvalidRequestError` before anything runs when one prompt or its parameters can not be served. A
        request that fails later, inside the core, fails alone: its output has finish_reason "error" and the cause as
        stop_reason.
        """
        self._alive()
        arrival = time.monotonic()
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else prompts
        parsed = [parse_prompt(prompt) for prompt in listed]
        params = self._per_prompt(sampling_params, len(parsed))
        if priority is not None and len(priority) != len(parsed):
            raise InvalidRequestError(f"{len(parsed)} prompts but {len(priority)} priorities", "priority")
        call, self._calls = self._calls, self._calls + 1
        admitted = []
        for i, (prompt, token_ids) in enumerate(zip(parsed, self._token_ids(parsed), strict=True)):
            with _naming(i, len(parsed)):
                if prompt.cache_salt is not None:
                    check_text(prompt.cache_salt, "cache_salt")
                request = self._admission.admit(
                    f"{call}.{i}",
                    prompt.text,
                    token_ids,
                    check_params(params[i]),
                    priority=priority[i] if priority is not None else 0,
                    cache_salt=prompt.cache_salt,
                )
            admitted.append(request)
        return self._run(admitted, arrival, use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of lists)."""
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
            self._tokenizer.check_length(text, "messages")
        ids = self._tokenizer.encode_batch(texts, add_special_tokens=False)  # the template wrote them out
        prompts: list[Prompt] = [{"prompt": text, "prompt_token_ids": i} for text, i in zip(texts, ids)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def shutdown(self) -> None:
        """Free the model and its memory; idempotent."""
        if not self._closed:
            self._closed = True
            self._client.close()
            self._tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _alive(self) -> CoreClient:
        if self._closed:
            raise CoreDiedError("this LLM was shut down")
        return self._client

    def _per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequestError(f"{count} prompts but {len(params)} sampling_params")
        return params

    def _run(self, admitted: list[AdmittedRequest], arrival: float, use_tqdm: bool) -> list[RequestOutput]:
        """Keep the core busy without overfilling its bounded queue; whatever interrupts this ends what is in flight."""
        waiting, in_flight = deque(admitted), 0
        sizes = {request.request_id: _num_sequences(request) for request in admitted}
        done: dict[str, RequestOutput] = {}
        limit = self.config.scheduler.max_waiting
        bar = Progress(len(admitted), use_tqdm)
        with interrupts_between_steps() as check_interrupt:
            try:
                while len(done) < len(admitted):
                    while waiting and (in_flight == 0 or in_flight + sizes[waiting[0].request_id] <= limit):
                        request = waiting.popleft()
                        self._processor.add(request, now=arrival, final_only=True)
                        self._client.send(request.message)
                        in_flight += sizes[request.request_id]
                    for output in self._step():
                        done[output.request_id] = output
                        in_flight -= sizes[output.request_id]
                        bar.update(output)
                    check_interrupt()
            finally:
                bar.close()
                self._abort_in_flight()
        return [done[request.request_id] for request in admitted]

    def _token_ids(self, prompts: Sequence[ParsedPrompt]) -> Iterator[list[int]]:
        """Of each, all texts at once. Raises `InvalidRequestError`."""
        texts = []
        for i, prompt in enumerate(prompts):
            if prompt.token_ids is None:
                with _naming(i, len(prompts)):
                    self._tokenizer.check_length(prompt.text or "")
                texts.append(prompt.text or "")
        with fails_alone("tokenizing"):
            encoded = iter(self._tokenizer.encode_batch(texts))
        return (next(encoded) if prompt.token_ids is None else prompt.token_ids for prompt in prompts)

    def _step(self) -> Iterator[RequestOutput]:
        """Receive once; the requests that ended."""
        outputs = self._client.recv()
        now = time.monotonic()
        self._stats = outputs.stats
        progress = self._processor.process(outputs.deltas, now)
        if progress.aborts:
            self._client.send(AbortRequests(request_ids=progress.aborts))
        for request_id in dict.fromkeys(progress.touched):
            if not self._processor.finished(request_id):
                continue
            error: EngineError | None = self._processor.error(request_id)
            try:
                output = self._processor.take(request_id)
            except RequestFailedError as failed:
                error, output = failed, self._processor.take_failed(request_id, failed)
            self._processor.remove(request_id, now)
            if error is not None:
                logger.warning("request %s failed: %s", request_id, error)
            if output is not None:
                yield output

    def _abort_in_flight(self) -> None:
        now = time.monotonic()
        core_ids = [
            core_id
            for request_id in self._processor.request_ids()
            for core_id in self._processor.remove(request_id, now)[0]
        ]
        if not core_ids:
            return
        try:
            self._client.send(AbortRequests(request_ids=core_ids))
        except EngineError as error:
            logger.debug("nothing to abort, the core is gone: %s", error)


def _num_sequences(request: AdmittedRequest) -> int:
    """That the core holds for it at a time."""
    beams = request.message.beams
    return max(len(request.message.request_ids), 0 if beams is None else beams.width)


@contextmanager
def _naming(index: int, count: int) -> Iterator[None]:
    """Of several prompts, the one at fault."""
    try:
        yield
    except InvalidRequestError as error:
        if count == 1:
            raise
        raise InvalidRequestError(f"prompt {index}: {error}", error.field) from error
