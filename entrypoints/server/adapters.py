"""Adapters by name: those that a server starts with, and those that are loaded and unloaded while it serves, under the
names of vLLM's routes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable

import msgspec
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from starlette.requests import HTTPConnection

from engine import AsyncEngine, LoRARequest
from engine.errors import InvalidRequestError
from entrypoints.server.error_shape import error_body
from entrypoints.server.fields import Body
from entrypoints.server.names import is_one_of


class LoRAModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What --lora-modules names."""

    name: str
    path: str
    base_model_name: str | None = None
    """shown as its parent; None: the served model's"""


class Adapters:
    """Not thread-safe: the event loop's."""

    def __init__(self, engine: AsyncEngine, served_names: Collection[str]) -> None:
        self._engine, self._served_names = engine, served_names
        self._numbers = itertools.count(1)
        """each name that is loaded has one that no other had: nothing of what was unloaded is found again"""
        self._modules: dict[str, tuple[LoRAModule, LoRARequest]] = {}
        self._gone: dict[str, None] = {}
        """names that were unloaded, the last ones last: as many as may be loaded"""

    def get(self, name: str | None) -> LoRARequest | None:
        known = self._modules.get(name) if name is not None else None
        return None if known is None else known[1]

    def has_left(self, name: str) -> bool:
        """It was unloaded."""
        return name in self._gone

    def listed(self) -> list[LoRAModule]:
        return [module for module, _ in self._modules.values()]

    async def load_all(self, modules: Iterable[LoRAModule]) -> None:
        """As `load`."""
        for module in modules:
            await self.load(module)

    async def load(self, module: LoRAModule, in_place: bool = False) -> None:
        """Requests may name it from now on. `in_place`: it may take the place of another one, with which requests that
        have begun with it end. Raises `InvalidRequestError`."""
        self._check_free(module.name, in_place)
        adapter = await self._engine.checked_lora(LoRARequest(module.name, next(self._numbers), module.path))
        self._check_free(module.name, in_place)
        self._modules[module.name] = module, adapter
        self._gone.pop(module.name, None)

    def unload(self, name: str) -> None:
        """Requests that have begun with it end with it. Raises `HTTPException` (404)."""
        if self._modules.pop(name, None) is None:
            message = f"the adapter {name[:100]!r} is not loaded"
            raise HTTPException(404, error_body(message, "invalid_request_error", "lora_name"))
        self._gone[name] = None
        if len(self._gone) > self._engine.config.limits.lora_modules:
            del self._gone[next(iter(self._gone))]

    def _check_free(self, name: str, in_place: bool) -> None:
        if is_one_of(name, self._served_names) or (name in self._modules and not in_place):
            raise InvalidRequestError(f"the name {name[:100]!r} is in use: unload it, or take another", "lora_name")
        self._engine.config.limits.check("lora_modules", len({*self._modules, name}), "lora_name")


class LoadAdapter(Body):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadAdapter(Body):
    lora_name: str


def add_routes(
    app: FastAPI,
    adapters: Adapters,
    refuse_several: Callable[[str], None],
    take_note: Callable[[Body, HTTPConnection], None],
) -> None:
    """`take_note`: as `ServerContext`'s."""
    app.state.adapters = adapters

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapter, request: Request) -> PlainTextResponse:
        refuse_several("adapters are loaded")
        take_note(body, request)
        await adapters.load(LoRAModule(body.lora_name, body.lora_path, body.base_model_name), body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapter, request: Request) -> PlainTextResponse:
        refuse_several("adapters are unloaded")
        take_note(body, request)
        adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
