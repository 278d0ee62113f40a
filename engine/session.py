"""Requests between a caller and the core: admitted, submitted, followed to their end, aborted, pinned. The one class
under `LLM`, which waits for the core itself, and under `AsyncEngine`, where a task listens to it (`engine.serving`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.adapters.request import LoRARequest
from engine.config import EngineArgs, EngineConfig
from engine.core.client import CoreClient, InProcessClient
from engine.core.wire import AbortRequests, CoreReady, CoreStats, ResetPrefixCache, StepOutputs, UnpinPrefix, Vocabulary
from engine.dense import load_dense
from engine.errors import CoreDiedError, EngineError, RequestFailedError
from engine.front_ends.client import FrontEndClient
from engine.frontend.admission import Admission, AdmittedRequest, ParsedPrompt, default_sampling_params
from engine.frontend.given_template import given_template
from engine.frontend.grammars import GrammarChecks
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.pins import PinnedPrefixes
from engine.frontend.texts import check_params, check_text, no_tokenizer
from engine.frontend.tokenizer import Tokenizer
from engine.grammars.vocabularies import ModelVocabulary
from engine.launched import leave_unless_first
from engine.models.description import ModelDescription
from engine.observability.metrics import EngineMetrics
from engine.observability.timings import RequestTimings
from engine.plan import resolve_with_plan
from engine.pooling import PoolingParams, ResolvedPooling, resolve_pooling, truncated
from engine.profiles import Profiles
from engine.replicas.client import ReplicatedClient
from engine.request import CompletionOutput, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)


def load_tokenizer(args: EngineArgs, config: EngineConfig) -> Tokenizer:
    """Raises `ConfigError`."""
    tokenizer = Tokenizer.load(
        config.model.tokenizer,
        Path(config.compile.cache_dir),
        limits=config.limits,
        max_model_len=config.model.max_model_len,
        chat_template=None if args.chat_template is None else given_template(args.chat_template, config.limits),
    )
    if not tokenizer.bound.reads_texts:
        logger.warning("%s; prompts of token ids are served", no_tokenizer(config.model.tokenizer))
    return tokenizer


def generates_not(model: ModelDescription) -> str:
    """What a model is that generates nothing, and what to ask it; empty: it generates."""
    if model.generates:
        return ""
    if model.head is None:
        return "this is an embedding model, which generates nothing: use /v1/embeddings, or LLM.embed"
    if model.head.form.pooled == "all":
        what, use = "judges each token", "/pooling, or LLM.encode with pooling_task token_classify"
    elif len(model.head.labels) == 1:
        what, use = "gives texts a score", "/score, /rerank or /classify, or LLM.score"
    else:
        what, use = "judges texts", "/classify, or LLM.classify"
    return f"this is a model that {what}, which generates nothing: use {use}"


def open_session(args: EngineArgs, client_factory: Callable[[EngineConfig], CoreClient]) -> Session:
    """Load a model and start its core. Raises `ConfigError` and the like, or `CoreDiedError`."""
    leave_unless_first(args)
    model, config = resolve_with_plan(args)
    tokenizer = load_tokenizer(args, config)
    client = client_factory(config)
    try:
        return Session(model, config, tokenizer, client, client.start())
    except BaseException:
        tokenizer.close()
        raise


class Session:
    """All that exists once an engine serves; its own type, so that no field is half there. Not thread-safe."""

    def __init__(
        self,
        model: ModelDescription,
        config: EngineConfig,
        tokenizer: Tokenizer,
        client: CoreClient,
        ready: CoreReady,
    ) -> None:
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.client = client
        self.ready = ready
        number = client.number if isinstance(client, FrontEndClient) else 0
        self.admission = Admission(config, tokenizer, generates_not=generates_not(model), front_end=number)
        if model.pooling.unsupported:
            logger.warning("embeddings of this model are not supported: %s", model.pooling.unsupported)
        self._dense = load_dense(model.pooling.dense, model.facts.final_size)
        self.processor = OutputProcessor(tokenizer)
        self.metrics = EngineMetrics(config.model.served_name, config.cache, ready)
        if isinstance(client, ReplicatedClient | FrontEndClient) and config.parallel.data > 1:
            self.metrics.stats_of_each = client.stats_of_each
        self.pinned = PinnedPrefixes(config.limits)
        self.profiles = Profiles(self)
        self.grammars = GrammarChecks(config.limits, self._vocabulary, tokenizer.backend)
        self._core_knows_vocabulary = False
        self.death: CoreDiedError | None = None
        self.closed = False

    def default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: what the model's authors recommend, else the defaults."""
        return default_sampling_params(self.model.generation_defaults)

    def resolve_pooling(self, params: PoolingParams | None) -> ResolvedPooling:
        """Raises `InvalidRequestError`."""
        model = self.model
        return resolve_pooling(params, model.pooling, model.facts.final_size, model.head, self._dense)

    def truncated(self, token_ids: list[int], params: PoolingParams | None) -> list[int]:
        """As `PoolingParams.truncate_prompt_tokens` wants it."""
        most = None if params is None else params.truncate_prompt_tokens
        return truncated(token_ids, most, self.config.model.max_model_len, self.tokenizer.suffix)

    def check_alive(self) -> None:
        """Raises what ended the core."""
        if self.death is not None:
            raise self.death

    def die(self, error: CoreDiedError) -> None:
        """Nothing is served any more. The first cause counts."""
        if self.death is None:
            self.death = error

    def close(self) -> None:
        """Stop the core and free everything."""
        self.closed = True
        self.client.close()
        self.tokenizer.close()
        self.grammars.close()

    # -- a request ---------------------------------------------------------------------------------------------------

    def admit(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AdmittedRequest:
        """Raises `InvalidRequestError`; changes nothing then."""
        if prompt.cache_salt is not None:
            check_text(prompt.cache_salt, "cache_salt")
        checked = check_params(params)
        structured = checked.structured_outputs
        return self.admission.admit(
            request_id,
            prompt.text,
            self.admission.truncated(token_ids, checked),
            checked,
            priority=priority,
            cache_salt=prompt.cache_salt,
            grammar=None if structured is None else self.grammars.check(structured),
            lora_request=lora_request,
        )

    def text_of(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams) -> str:
        """What of a prompt's text is tokenized. Raises `InvalidRequestError`."""
        text, generates = prompt.text or "", not isinstance(params, PoolingParams)
        if getattr(params, "truncate_prompt_tokens", None) is None:  # what are no parameters is refused later
            return self.tokenizer.bound.check(text, generates=generates)
        return self.tokenizer.bound.cut(text, keep_end=generates)

    def submit(
        self, admitted: AdmittedRequest, arrival: float, *, delta: bool = False, final_only: bool = False
    ) -> None:
        """Raises `QueueFullError` or `CoreDiedError`, and nothing is left of the request then."""
        self.check_alive()
        now = time.monotonic()
        self.processor.add(admitted, now=now, arrival=arrival, delta=delta, final_only=final_only)
        try:
            if admitted.message.grammar is not None:
                self.tell_vocabulary()
            self.client.send(admitted.message)
        except BaseException:  # the core does not know it, so nobody tells it of its end
            self.processor.remove(admitted.request_id, time.monotonic())
            raise

    def tell_vocabulary(self) -> None:
        """Once, before the first grammar at the latest."""
        if not self._core_knows_vocabulary:
            eos = sorted(self.admission.eos_token_ids)
            self.client.send(Vocabulary(tokenizer=self.tokenizer.backend.to_str(), eos_token_ids=eos))
            self._core_knows_vocabulary = True

    def _vocabulary(self) -> ModelVocabulary:
        return ModelVocabulary(
            tokenizer=self.tokenizer.backend.to_str(),
            eos_token_ids=sorted(self.admission.eos_token_ids),
            vocab_size=self.config.model.vocab_size,
        )

    def begin_anew(self) -> None:
        """The core has ended, and counts anew where it was in this process."""
        if isinstance(self.client, InProcessClient):
            self.metrics.stats = CoreStats()

    def take_in(self, outputs: StepOutputs) -> list[str]:
        """What the core has told. Returns the requests with news."""
        self.metrics.stats = outputs.stats
        if outputs.step is not None:
            self.metrics.observe_step(outputs.step)
        now = time.monotonic()
        progress = self.processor.process(outputs.deltas, now)
        self.metrics.observe_gaps(progress.gaps, now)
        if progress.aborts:
            self.client.send(AbortRequests(request_ids=progress.aborts))
        for timings in progress.finished:
            self.metrics.observe_request(timings)
        return progress.touched

    def take(self, name: str) -> RequestOutput | None:
        """What is new of a request. What has failed has finish_reason "error", and is finished."""
        error: EngineError | None = self.processor.error(name)
        try:
            output = self.processor.take(name)
        except RequestFailedError as failed:
            error, output = failed, self.processor.take_failed(name, failed)
            output.finished = True
        if error is not None:
            logger.warning("request %s failed: %s", name, error)
        return output

    def abort(self, name: str) -> None:
        """It ends with what there is; an unknown name is ignored."""
        self._ended(*self.processor.abort(name, time.monotonic()))

    def forget(self, names: Sequence[str]) -> None:
        """Their callers have what they wanted, or have left; the core is told of those that run."""
        now, core_ids = time.monotonic(), list[str]()
        for name in names:
            running, timings = self.processor.remove(name, now)
            core_ids += running
            self._ended([], timings)
        self._ended(core_ids, None)

    # -- prefixes ----------------------------------------------------------------------------------------------------

    def pin_completed(self, name: str, num_tokens: int, ended: CompletionOutput) -> int:
        """`ended`: of the request that computed the prefix. Returns the number of tokens, or raises
        `RequestFailedError`."""
        if ended.finish_reason not in ("length", "stop"):
            raise RequestFailedError(f"the prefix {name!r} was not pinned: its request was aborted")
        return self.pinned.complete(name, num_tokens)

    def pin_failed(self, name: str) -> None:
        """The name is free again, and the core keeps nothing under it: it may have it already."""
        self.pinned.release(name)
        self.tell(UnpinPrefix(name=name))

    def unpin(self, name: str) -> None:
        """What was pinned is cached like any other prefix from now on. Raises `InvalidRequestError`."""
        self.pinned.remove(name)
        self.client.send(UnpinPrefix(name=name))

    def tell(self, message: AbortRequests | UnpinPrefix | ResetPrefixCache) -> None:
        """What a dead core need not know."""
        if self.death is None:
            try:
                self.client.send(message)
            except CoreDiedError as error:
                self.die(error)

    def _ended(self, core_ids: list[str], timings: RequestTimings | None) -> None:
        """Tell the core and the metrics of requests that ended before their time."""
        if timings is not None:
            self.metrics.observe_request(timings)
        if core_ids:
            self.tell(AbortRequests(request_ids=core_ids))
