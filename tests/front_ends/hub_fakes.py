"""Front ends of one hub over real sockets, and cores that say what they are told to say."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from core_fakes import tiny_config

from engine.core.supervision import SocketDirectory
from engine.core.wire import CoreReady, CoreStats, Delta, SequenceDelta, StepOutputs, StepTaken, ToCore, each_delta
from engine.errors import CoreDiedError
from engine.front_ends.client import FrontEndClient
from engine.front_ends.hub import Hub
from engine.front_ends.wire import FrontEndStart

READY = CoreReady(
    num_blocks=64,
    block_size=16,
    max_model_len=4096,
    attention_backend="none",
    ledger="",
    distinct_pieces=0,
    pieces_compiled=0,
    startup_seconds=0.0,
)


class Cores:
    """A `CoreClient` that says what it is told to say."""

    def __init__(self) -> None:
        self.told: list[ToCore] = []
        self.refuses: Exception | None = None
        self.why_stalled: str | None = None
        self.says: asyncio.Queue[StepOutputs | CoreDiedError] = asyncio.Queue()

    def send(self, message: ToCore) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.told.append(message)

    async def recv_async(self) -> StepOutputs:
        said = await self.says.get()
        if isinstance(said, CoreDiedError):
            raise said
        return said

    def say(self, *deltas: Delta, step: StepTaken | None = None, generated: int = 0) -> None:
        self.says.put_nowait(StepOutputs(deltas=[*deltas], stats=CoreStats(generated_tokens=generated), step=step))

    def stalled(self) -> str | None:
        return self.why_stalled


class Together:
    def __init__(
        self, hub: Hub, cores: Cores, clients: list[FrontEndClient], running: asyncio.Task[CoreDiedError]
    ) -> None:
        self.hub, self.cores, self.clients, self.running = hub, cores, clients, running
        self.got: list[list[StepOutputs]] = [[] for _ in clients]
        self.died: list[str | None] = [None for _ in clients]
        self._tasks = [asyncio.create_task(self._receive(place)) for place in range(len(clients))]

    async def _receive(self, place: int) -> None:
        try:
            while True:
                self.got[place].append(await self.clients[place].recv_async())
        except CoreDiedError as error:
            self.died[place] = str(error)

    def tokens(self, place: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for outputs in self.got[place]:
            for delta in each_delta(outputs.deltas):
                found[delta.request_id] += delta.token_ids
        return found

    def ended(self, place: int) -> dict[str, SequenceDelta]:
        deltas = [delta for outputs in self.got[place] for delta in each_delta(outputs.deltas)]
        return {delta.request_id: delta for delta in deltas if delta.finish_reason is not None}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)

    async def has_heard(self, place: int, name: str, tokens: list[int]) -> None:
        await self.until(lambda: self.tokens(place)[name] == tokens)

    async def was_told(self, message: ToCore) -> None:
        await self.until(lambda: message in self.cores.told)

    async def close(self) -> None:
        self.running.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self.running, *self._tasks, return_exceptions=True)
        for client in self.clients:
            client.close()


@asynccontextmanager
async def together(count: int, frames: int = 65536) -> AsyncIterator[Together]:
    config, cores, directory = tiny_config(frames=frames), Cores(), SocketDirectory()
    hub = Hub(config, cores, directory)  # type: ignore[arg-type]  # of a client it needs these
    starts = [
        FrontEndStart(
            number=number,
            config=config,
            parent_pid=os.getpid(),
            to_hub=directory.to_core,
            from_hub=hub.address(number),
            directory=directory.path,
        )
        for number in range(1, count + 1)
    ]
    clients = [FrontEndClient(start) for start in starts]
    running = asyncio.create_task(hub.run(READY))
    try:
        readies = await asyncio.gather(*(asyncio.to_thread(client.start) for client in clients))
        assert readies == [READY] * count
        for client in clients:
            client.serves()
        all_of_them = Together(hub, cores, clients, running)
        await all_of_them.until(lambda: sum(each.serves for each in hub._front_ends.values()) == count)
        try:
            yield all_of_them
        finally:
            await all_of_them.close()
    finally:
        hub.close()
        directory.remove()
