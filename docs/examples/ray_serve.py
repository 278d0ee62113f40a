"""Pageloom's server as an application of Ray Serve, with all that `engine-serve` answers:

    pip install 'pageloom[ray]' 'ray[serve]'
    ray start --head
    serve run ray_serve:application model=PATH max_model_len=4096 replicas=2

Settings are those of `EngineArgs`. With `tensor_parallel_size=2 distributed_executor_backend=ray` the ranks of a
replica are placed by Ray, too: for each replica, bundles of `threads` CPUs must be free beside its own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve

from engine import AsyncEngine
from engine.config import make_args


def application(given: Mapping[str, Any]) -> serve.Application:
    """`given`: model, replicas, cpus (of a replica, which its core computes with), and settings of the engine."""
    settings = {name: value_of(value) for name, value in given.items()}
    model, replicas = str(settings.pop("model")), settings.pop("replicas", 1)
    cpus = settings.pop("cpus", settings.get("threads", 1))
    running: list[AsyncEngine] = []

    def build() -> FastAPI:
        """In each replica."""
        from entrypoints.server.app import create_app

        @asynccontextmanager
        async def lifespan(outer: FastAPI) -> AsyncIterator[None]:
            engine = AsyncEngine(make_args(model, settings))
            await engine.start()
            server = create_app(engine, engine.served_name)
            outer.mount("/", server)
            running.append(engine)
            async with server.router.lifespan_context(server):  # which shuts the engine down
                yield

        return FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    class Pageloom:
        def check_health(self) -> None:
            """Serve replaces a replica whose engine has died."""
            for engine in running:
                engine.check_health()

    deployment = serve.deployment(
        serve.ingress(build)(Pageloom), num_replicas=replicas, ray_actor_options={"num_cpus": cpus}
    )
    return deployment.bind()


def value_of(given: Any) -> Any:
    """'2' is a number on the command line, 'PATH' a text."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given
