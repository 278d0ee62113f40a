"""`LLM`: a batch of prompts in, a list of outputs out. Names and shapes follow vLLM's offline API."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from engine.batch_run import Progress, interrupts_between_steps
from engine.config import EngineArgs, EngineConfig, ModelConfig, make_args
from engine.core.client import CoreClient, InProcessClient, ProcessClient
from engine.core.wire import CoreStats, ResetPrefixCache
from engine.errors import InvalidRequestError, QueueFullError, ShutDownError
from engine.frontend.admission import PROMPT_ONLY, AdmittedRequest, ParsedPrompt, Prompt, parse_prompt, parse_prompts
from engine.frontend.conversation import ChatMessage
from engine.frontend.failures import fails_alone
from engine.frontend.texts import check_params, check_text
from engine.frontend.tokenizer import Tokenizer
from engine.pooled_calls import PooledCalls
from engine.request import RequestOutput, SamplingParams
from engine.resolve import resolve_here
from engine.session import Session

logger = logging.getLogger(__name__)

ClientFactory = Callable[[EngineConfig], CoreClient]


class LLM(PooledCalls):
    """A model, loaded and ready. Use it as a context manager, or call `shutdown`, to free its memory at a certain time.

    One thread at a time. With `in_process` the core runs in the calling thread (nothing to start, easy to debug);
    without, in a process of its own, so that tokenizing and detokenizing overlap with the model.
    """

    def __init__(self, model: str | PathLike[str], *, in_process: bool = True, **settings: Any) -> None:
        """`model`: a Hugging Face directory, a GGUF file or a hub's name for either (`engine.hub`). `settings`: those
        of `EngineArgs`. Raises `ConfigError`."""
        self._start(make_args(model, settings), InProcessClient if in_process else ProcessClient)

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
        self.model, self.config = resolve_here(args)
        self._tokenizer = Tokenizer.load(
            self.config.model.tokenizer,
            Path(self.config.compile.cache_dir),
            limits=self.config.limits,
            max_model_len=self.config.model.max_model_len,
        )
        client = client_factory(self.config)
        self.ready = client.start()
        self._session = Session(self.model, self.config, self._tokenizer, client, self.ready)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer in use; its `hf` is transformers' object."""
        return self._tokenizer

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
            [ids] = self._token_ids([parsed])
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

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes before the next request runs."""
        self._alive().client.send(ResetPrefixCache())

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
        parsed = parse_prompts(prompts)
        params = self._per_prompt(sampling_params, len(parsed))
        if priority is not None and len(priority) != len(parsed):
            raise InvalidRequestError(f"{len(parsed)} prompts but {len(priority)} priorities", "priority")
        call = self._number_call()
        admitted = []
        for i, (prompt, token_ids) in enumerate(zip(parsed, self._token_ids(parsed), strict=True)):
            with _naming(i, len(parsed)):
                if prompt.cache_salt is not None:
                    check_text(prompt.cache_salt, "cache_salt")
                checked = check_params(params[i])
                structured = checked.structured_outputs
                request = self._session.admission.admit(
                    f"{call}.{i}",
                    prompt.text,
                    token_ids,
                    checked,
                    priority=priority[i] if priority is not None else 0,
                    cache_salt=prompt.cache_salt,
                    grammar=None if structured is None else self._session.grammars.check(structured),
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
            self._session.client.close()
            self._tokenizer.close()
            self._session.grammars.close()

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
                        try:
                            self._session.submit(waiting[0], arrival, final_only=True)
                        except QueueFullError:
                            if not in_flight:
                                raise
                            break  # what is there will empty it
                        in_flight += sizes[waiting.popleft().request_id]
                    touched = self._session.take_in(self._session.client.recv())
                    for output in self._session.take_ended(touched):
                        done[output.request_id] = output
                        in_flight -= sizes[output.request_id]
                        bar.update(output)
                    check_interrupt()
            finally:
                bar.close()
                self._session.forget(self._session.processor.request_ids())
        for request in admitted:
            outputs = done[request.request_id].outputs
            self._session.grammars.validate(request.params, [(output, output.text) for output in outputs])
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
