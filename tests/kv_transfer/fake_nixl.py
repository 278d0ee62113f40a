"""What of NIXL's surface is used, between agents of one process; a transfer is done after some turns."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

from engine.kv_transfer import nixl_agent
from engine.kv_transfer.nixl_agent import NixlAgent


class FakeTransfer:
    def __init__(self, agent: FakeAgent, copy: tuple[int, int, int], name: str) -> None:
        self.agent, self.copy, self.name, self.turns, self.released = agent, copy, name, 0, False

    def release(self) -> None:
        assert not self.released
        self.released = True


class FakeAgent:
    def __init__(self, library: FakeNixl, name: str, config: dict[str, Any]) -> None:
        assert config["enable_prog_thread"] is False, "it spins"
        self.library, self.name = library, name
        self.backends = {each: object() for each in config["backends"] if each in library.plugins}
        self.regions: list[tuple[int, int]] = []
        self.remotes: dict[str, set[tuple[int, int]]] = {}
        self.turned = 0
        library.agents[name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> tuple[int, int]:
        ((address, size, device, _),) = regions
        assert (kind, device) == ("DRAM", 0)
        self.regions.append((address, size))
        return address, size

    def get_partial_agent_metadata(self, region: tuple[int, int], inc_conn_info: bool) -> bytes:
        assert inc_conn_info
        return json.dumps([self.name, *region]).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, address, size = json.loads(metadata)
        self.remotes.setdefault(name, set()).add((address, size))
        return bytes(name, "ascii")

    def remove_remote_agent(self, name: str) -> None:
        del self.remotes[name]

    def get_xfer_descs(self, each: list[tuple[int, int, int]], kind: str) -> tuple[int, int]:
        ((address, size, device),) = each
        assert (kind, device) == ("DRAM", 0)
        return address, size

    def initialize_xfer(self, what: str, here: tuple[int, int], there: tuple[int, int], name: str) -> FakeTransfer:
        assert what == "READ" and here[1] == there[1] and within(here, self.regions)
        if not within(there, self.remotes[name]):
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return FakeTransfer(self, (here[0], there[0], here[1]), name)

    def transfer(self, transfer: FakeTransfer) -> str:
        return self.check_xfer_state(transfer)

    def check_xfer_state(self, transfer: FakeTransfer) -> str:
        transfer.turns += 1
        if transfer.name not in self.remotes:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if self.library.stuck or transfer.turns < 3:
            return "PROC"
        here, there, size = transfer.copy
        if self.library.fails or not within((there, size), self.library.agents[transfer.name].regions):
            return "ERR"
        ctypes.memmove(here, there, size)
        return "DONE"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.turned += 1
        return {}


class FakeNixl:
    """Stands for the module."""

    def __init__(self) -> None:
        self.plugins, self.agents, self.stuck, self.fails = ["UCX"], dict[str, FakeAgent](), False, False

    def nixl_agent_config(self, **given: Any) -> dict[str, Any]:
        return given

    def nixl_agent(self, name: str, config: dict[str, Any]) -> FakeAgent:
        return FakeAgent(self, name, config)

    def make(self, name: str) -> NixlAgent:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nixl_agent, "_library", lambda: self)
            return NixlAgent(name, ("UCX",))


def within(part: tuple[int, int], regions: Any) -> bool:
    return any(start <= part[0] and sum(part) <= start + size for start, size in regions)
