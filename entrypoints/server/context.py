"""What the routes share: the engine, the served name, and how one HTTP request becomes engine streams."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec
from fastapi import HTTPException
from starlette.requests import HTTPConnection

from engine import AsyncEngine, SamplingParams
from engine.config import EngineConfig
from engine.dialects.resolve import AUTO
from engine.errors import ConfigError, InvalidRequestError
from engine.frontend.admission import PairPrompt
from engine.frontend.fill_in import FillIn, fill_in_of, no_fill_in
from engine.pooling import PoolingParams, PoolingRequestOutput
from engine.request import NOBODY, RequestOutput, Tenant
from engine.session import generates_not
from entrypoints.server.adapters import Adapters, LoRAModule
from entrypoints.server.caller import CALLER, TIMEOUT_HEADER
from entrypoints.server.errors import model_not_found
from entrypoints.server.fields import Body
from entrypoints.server.key_usage import UsageLog
from entrypoints.server.keys import CLIENT
from entrypoints.server.observers import Observers
from entrypoints.server.request_ids import add_header, request_id_of
from entrypoints.server.request_log import RequestLog
from entrypoints.server.speech import Speech
from entrypoints.server.token_text import TokenTexts
from entrypoints.server.tracing import Tracing

EnginePrompt = str | PairPrompt | Mapping[str, object]
Outputs = AsyncGenerator[RequestOutput, None]

IGNORED = "x-pageloom-ignored"
MOST_TIMEOUT_S = 86400
_MOST_TOLD = 20
_MOST_CHARS = 64
_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]\-]")

logger = logging.getLogger("pageloom.server")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What whoever serves decides about the doors; names are the options' of engine-serve."""

    strict_fields: bool = False
    """what no field is known for is refused, not ignored"""
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    reasoning_field: Literal["reasoning", "reasoning_content", "both"] = "reasoning"
    """under which thinking is given out"""
    response_store: Path | None = None
    """file of `/v1/responses`; None: in memory"""
    model_aliases: tuple[str, ...] = ()
    """further names that the model goes by: those of --served-model-name but the first"""
    lora_modules: tuple[LoRAModule, ...] = ()
    """adapters that are loaded at the start"""
    log_requests: bool = False
    log_prompts: bool = False
    """texts, too, in the log's lines and in spans"""
    max_log_len: int = 2000
    otlp_endpoint: str | None = None
    """where a span for each request is sent"""
    default_timeout: float | None = None
    """seconds in which a request must end that does not say so itself; None: it has time"""
    enable_sleep_mode: bool = False
    """whoever may administer may put the engine to sleep, and change its weights"""
    profile_dir: Path | None = None
    """where profiles are written, if whoever may administer may ask for them"""
    usage_log: Path | None = None
    """file of what each client's requests have used"""
    api_server_count: int = 1
    """processes that take requests for the same cores"""

    def refuse_several(self, what: str) -> None:
        """Of what one process does for its own requests. Raises `InvalidRequestError`."""
        if self.api_server_count > 1:
            raise InvalidRequestError(f"{what} while one process alone takes requests, without --api-server-count")


class Queued(Protocol):
    """What bodies say of their place among others."""

    @property
    def model(self) -> str | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str | None: ...


class Place(NamedTuple):
    """Of what is generated for a body that says nothing of it."""

    model: str | None
    priority: int = 0
    cache_salt: str | None = None


def fingerprint_of(config: EngineConfig) -> str:
    model = config.model
    made_by = (version("pageloom"), model.path, model.dtype, model.quantization)
    return "fp_" + hashlib.sha256(repr(made_by).encode()).hexdigest()[:10]


class ServerContext:
    """The engine must be started."""

    def __init__(self, engine: AsyncEngine, served_name: str, settings: ServerSettings) -> None:
        """Raises `ConfigError`."""
        self.engine = engine
        self.served_name = served_name
        self.names = tuple(dict.fromkeys((served_name, *settings.model_aliases)))
        """that requests may give the model; answers give it the first"""
        if not all(self.names):
            raise ConfigError("--served-model-name: a name must not be empty")
        self.settings = settings
        self.adapters = Adapters(engine, self.names)
        self.speech = Speech(engine.tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        config = self._config = engine.config
        self._fingerprint = fingerprint_of(config)
        self.texts = TokenTexts(engine.tokenizer)
        self._fill_in = fill_in_of(engine.tokenizer, config.limits, engine.max_model_len)
        recommended = engine.model.generation_defaults.get("max_new_tokens")
        self.recommended_max_tokens = None if recommended is None else int(recommended)
        """for requests that leave it out"""
        texts = settings.max_log_len if settings.log_prompts else None
        self._tracing = None if settings.otlp_endpoint is None else Tracing(settings.otlp_endpoint, texts)
        self._usage = None if settings.usage_log is None else UsageLog(settings.usage_log)
        told = [RequestLog(texts) if settings.log_requests else None, self._tracing, self._usage]
        self._observers = Observers([each for each in told if each is not None], served_name)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: the same while answers are made in the same way."""
        if self.engine.config is not self._config:  # other weights are served
            self._config = self.engine.config
            self._fingerprint = fingerprint_of(self._config)
        return self._fingerprint

    @property
    def fills_in(self) -> bool:
        return self._fill_in is not None

    def fill_in(self, field: str) -> FillIn:
        """Raises `InvalidRequestError` for `field` where the model cannot."""
        if self._fill_in is None:
            raise no_fill_in(field)
        return self._fill_in

    def check_model(self, name: str | None, generates: bool = False) -> None:
        """A wrong name is a 404; none means the one served, but to a server that is strict, as OpenAI is. What
        `generates` may name an adapter."""
        if name is None and self.settings.strict_fields:
            raise InvalidRequestError("model is missing (--strict-fields)", "model", "missing_required_parameter")
        if name is None or name in self.names:
            return
        if not self.adapters.get(name):
            raise HTTPException(404, model_not_found(name, self.names))
        if not generates:
            raise InvalidRequestError(f"{name[:100]!r} is an adapter, which generates: ask the model itself", "model")

    def check_generates(self) -> None:
        """Before it is said that a model has no chat template, which is the lesser reason."""
        if because := generates_not(self.engine.model):
            raise InvalidRequestError(because, "model")

    def name_of(self, name: str | None) -> str:
        """What an answer says of who has answered a request that asks for `name`."""
        if name is not None and (self.adapters.get(name) or self.adapters.has_left(name)):  # while it was answered
            return name
        return self.served_name

    def take_note(self, body: Body, request: HTTPConnection, more: Sequence[str] = ()) -> None:
        """Of fields that nobody knows, and `more` that is passed over: a line in the log and a header, or
        `InvalidRequestError`."""
        unknown = [*body.unknown_fields(), *more]
        if not unknown:
            return
        if self.settings.strict_fields:
            name = unknown[0][:_MOST_CHARS]
            raise InvalidRequestError(f"{name}: unrecognized request argument (--strict-fields)", name)
        names = ", ".join(_PLAIN.sub("?", name[:_MOST_CHARS]) for name in unknown[:_MOST_TOLD])
        add_header(request.scope, IGNORED, names)
        logger.info("request %s: fields that nobody knows are ignored: %s", request_id_of(request.scope), names)

    def generate(
        self, prompt: EnginePrompt, params: SamplingParams, body: Queued, request_id: str, *, delta: bool
    ) -> Outputs:
        if body.model is not None and self.adapters.has_left(body.model):  # since it was first looked at
            raise HTTPException(404, model_not_found(body.model, self.names))
        salt, tenant = self._share(body)
        stream: AsyncIterator[RequestOutput] = self.engine.generate(
            prompt,
            params,
            request_id,
            priority=body.priority,
            cache_salt=salt,
            tenant=tenant,
            timeout_s=self._timeout_s(),
            arrived_at=time.monotonic(),
            delta=delta,
            final_only=not delta,
            lora_request=self.adapters.get(body.model),
            watch=self._observers.watch(request_id, params, body, streams=delta),
        )
        assert isinstance(stream, AsyncGenerator), "closing it is what aborts the request"
        return stream

    def encode(
        self, prompt: EnginePrompt, params: PoolingParams, body: Queued, request_id: str
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        salt, tenant = self._share(body)
        stream: AsyncIterator[PoolingRequestOutput] = self.engine.encode(
            prompt,
            params,
            request_id,
            priority=body.priority,
            cache_salt=salt,
            tenant=tenant,
            timeout_s=self._timeout_s(),
            arrived_at=time.monotonic(),
            watch=self._observers.watch(request_id, params, body, streams=False),
        )
        assert isinstance(stream, AsyncGenerator), "closing it is what aborts the request"
        return stream

    def _timeout_s(self) -> float | None:
        """What is left of the caller's header, or of what whoever serves has set. Raises `InvalidRequestError`."""
        caller = CALLER.get()
        if caller is None:
            return self.settings.default_timeout
        passed = time.monotonic() - caller.arrived
        if caller.timeout is None:
            default = self.settings.default_timeout
            return None if default is None else default - passed
        try:
            seconds = float(caller.timeout)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MOST_TIMEOUT_S:
            raise InvalidRequestError(
                f"{TIMEOUT_HEADER} must be a number of seconds above 0 and up to {MOST_TIMEOUT_S}", TIMEOUT_HEADER
            )
        return seconds - passed

    def _share(self, body: Queued) -> tuple[str | None, Tenant]:
        """The salt of its prefixes, and whose share of the engine it takes."""
        client = CLIENT.get()
        if client is None:
            return body.cache_salt, NOBODY
        if body.priority < client.priority_from:
            message = f"priority: this key may ask for {client.priority_from} or what is less urgent"
            raise InvalidRequestError(message, "priority")
        self.engine.config.limits.check("cache_salt_chars", len(body.cache_salt or ""), "cache_salt")
        return client.cache_salt(body.cache_salt), client.tenant

    async def close(self) -> None:
        """Behind the last request."""
        if self._usage is not None:
            self._usage.close()
        if self._tracing is not None:
            await self._tracing.close()


async def last(stream: Outputs) -> RequestOutput:
    """The one output of a request of which only the end is wanted."""
    final: RequestOutput | None = None
    async with aclosing(stream):
        async for output in stream:
            final = output
    assert final is not None, "a stream ends with a finished output"
    return final
