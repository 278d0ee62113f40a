"""Pages come from this host and from those that the setting names; nobody else is asked, nor looked up."""

from __future__ import annotations

import socket
from typing import NoReturn

import pytest

from engine.errors import ConfigError
from engine.kv_transfer.frames import TransferError
from engine.kv_transfer.sources import Sources


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def numbers_only(host: str, *given: object, **more: object) -> object:
        if not host.replace(".", "").isdigit() and ":" not in host:
            _looked_up(host)
        return real(host, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", numbers_only)


def _looked_up(host: str) -> NoReturn:
    raise AssertionError(f"{host} was looked up")


def test_this_host_is_one_without_a_word() -> None:
    sources = Sources(())
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "LocalHost"):
        sources.check(host)


OTHERS = (
    "192.0.2.9",
    "169.254.169.254",
    "metadata.internal",
    "",
    "a\nb",
    "\0",
    "127.0.0.1.example",
    "[::1]",
    "2130706433",
)


@pytest.mark.parametrize("host", OTHERS)
def test_others_are_not_and_a_message_about_them_is_one_line(host: str) -> None:
    with pytest.raises(TransferError, match="none of this server's kv_sources") as refused:
        Sources(("10.0.0.0/24", "prefill.internal")).check(host)
    assert "\n" not in str(refused.value) and "\0" not in str(refused.value)


def test_networks_addresses_and_names_that_are_given() -> None:
    sources = Sources(("10.0.0.0/24", "192.0.2.7", "2001:db8::/32", "prefill.internal"))
    for host in ("10.0.0.200", "192.0.2.7", "2001:db8::5", "Prefill.Internal"):
        sources.check(host)
    for host in ("10.0.1.1", "192.0.2.8", "2001:db9::5", "other.internal"):
        with pytest.raises(TransferError):
            sources.check(host)


@pytest.mark.parametrize("given", ["10.0.0.0/99", " "])
def test_what_is_no_network_and_no_name_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="kv_sources"):
        Sources((given,))
