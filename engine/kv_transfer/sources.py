"""From whom pages are taken: this host, and those that the setting names. A request says where its pages are, and
whoever may send one must not choose what is cached under others' prompts, nor to whom this engine connects."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from engine.errors import ConfigError
from engine.kv_transfer.frames import TransferError

_LOOPBACK_NAMES = ("localhost",)


class Sources:
    def __init__(self, given: Sequence[str]) -> None:
        """`given`: networks ("10.0.0.0/8"), addresses, names of hosts. Raises `ConfigError`."""
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: set[str] = set(_LOOPBACK_NAMES)
        for each in given:
            try:
                self._networks.append(ipaddress.ip_network(each, strict=False))
            except ValueError:
                if "/" in each or not each.strip():
                    raise ConfigError(f"kv_transfer_config: kv_sources: {each!r} is no network and no name") from None
                self._names.add(each.lower())

    def check(self, host: str) -> None:
        """Raises `TransferError`. No name is looked up that is not one of these."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            is_one = host.lower() in self._names
        else:
            is_one = address.is_loopback or any(address in network for network in self._networks) or is_own(host)
        if not is_one:
            raise TransferError(f"{host[:200]!r} is none of this server's kv_sources")


def check_address(host: str) -> None:
    """Raises `ConfigError` where others could not find this host by it."""
    if not is_own(host) or host in ("", "0.0.0.0", "::"):
        raise ConfigError(f"kv_transfer_config: kv_ip {host!r} is no address of this host that others could be told")


def is_own(host: str) -> bool:
    """An address of this machine: one that a socket can be bound to."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):
        return False
    return True
