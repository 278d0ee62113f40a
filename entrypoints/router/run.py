"""`engine-serve --role`: what each role means, and the router's process."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from entrypoints.options import refuse_without_effect

_OF_A_ROUTER = {"role", "prefill", "decode", "host", "port", "ssl_certfile", "ssl_keyfile", "limits", "config"}
_OF_A_ROUTER |= {"shutdown_timeout", "drain_delay", "log_level", "log_format"}
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def add_role_options(parser: argparse.ArgumentParser) -> None:
    role = parser.add_argument_group("prefill apart from decode (docs/disaggregation.md)")
    role.add_argument(
        "--role",
        choices=[*_ROLES, "router"],
        help="prefill: compute prompts for others; decode: take them over and go on; router: serve no model, but pass "
        "requests on to such servers. The first two stand for a --kv-transfer-config",
    )
    for name in _ROLES:
        role.add_argument(
            f"--{name}",
            type=_url,
            nargs="+",
            action="extend",
            default=[],
            metavar="URL",
            help=f"of the router: a {name} server, as http://10.0.0.1:8000",
        )


def check_role(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with a usage error where an option has no effect; gives a server of a role its configuration."""
    if options.role == "router":
        missing = [f"--{name} URL" for name in _ROLES if not getattr(options, name)]
        if missing:
            parser.error(f"--role router needs {' and '.join(missing)}, too")
        if options.uds is not None:
            parser.error("--uds has no effect with --role router, which listens at a host and a port")
        if options.model is not None:
            parser.error("--role router serves no model of its own: leave it out")
        if options.api_key is not None or options.api_key_file is not None or options.keys is not None:
            parser.error(
                "--api-key and --keys have no effect with --role router: give them to the servers, which are told "
                "clients' keys"
            )
        others = vars(options).keys() - _OF_A_ROUTER
        refuse_without_effect(parser, options, others, "with --role router: give it to the servers")
        return
    if options.prefill or options.decode:
        parser.error("--prefill and --decode have no effect without --role router")
    if options.role is not None:
        given: dict[str, Any] = dict(options.kv_transfer_config or {})
        role = given.setdefault("kv_role", _ROLES[options.role])
        if role not in (_ROLES[options.role], "kv_both"):
            parser.error(f"--role {options.role} contradicts kv_role {role} of --kv-transfer-config")
        options.kv_transfer_config = {"kv_connector": "NixlConnector", **given}


async def serve_router(options: argparse.Namespace, listener: socket.socket) -> int:
    """Until a signal. Returns the exit status. Raises `ConfigError`."""
    import uvicorn

    from engine.limits import parse_limits
    from entrypoints.router.app import Router, RouterServer
    from entrypoints.server.ending import signals_are_uvicorns

    prefill, decode = apart(options.prefill, options.decode, *listener.getsockname()[:2])
    router = Router(prefill, decode, parse_limits(options.limits or ()))
    config = uvicorn.Config(
        router.app(),
        log_config=None,
        log_level="warning",
        server_header=False,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    server = RouterServer(config, router, options.shutdown_timeout, options.drain_delay)
    with signals_are_uvicorns():
        await server.serve(sockets=[listener])
    return 0 if server.started else 1


def apart(prefill: Sequence[str], decode: Sequence[str], host: str, port: int) -> tuple[list[str], list[str]]:
    """The servers of both kinds, each once. `host`, `port`: of the router. Raises `ConfigError` where one server has
    both roles, or is the router itself."""
    from engine.errors import ConfigError
    from engine.kv_transfer.sources import is_own

    first, second = ({_place(url): url.rstrip("/") for url in reversed(urls)} for urls in (prefill, decode))
    if both := first.keys() & second.keys():
        raise ConfigError(f"--prefill and --decode both name {first[min(both)]}: a server has one role")
    for (address, of, _), url in {**first, **second}.items():
        if of == port and (address == host or (host in ("0.0.0.0", "::") and is_own(address))):
            raise ConfigError(f"{url} is this router's own address: name the servers behind it")
    return [*reversed(first.values())], [*reversed(second.values())]


def _place(url: str) -> tuple[str, int, str]:
    """Address, port and path, however the host is called."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError, UnicodeError):  # nobody knows it yet
        host = str(min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))[4][0])
    return host, port, parts.path.rstrip("/")


def _url(text: str) -> str:
    """Everybody sees it in /health and /metrics, so a password has no place in it."""
    parts = urlsplit(text)
    try:
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port
        fits = False
    if not fits or "@" in parts.netloc or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL, as http://10.0.0.1:8000")
    return text
