"""`engine-serve --role`: what each role means, and the router's process."""

from __future__ import annotations

import argparse
import logging
import socket
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger("pageloom.router")

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
        if not options.prefill or not options.decode:
            parser.error("--role router needs --prefill URL and --decode URL")
        if options.model is not None:
            parser.error("--role router serves no model of its own: leave it out")
        if options.api_key is not None or options.api_key_file is not None:
            parser.error(
                "--api-key has no effect with --role router: give it to the servers, which are told clients' keys"
            )
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
    """Until a signal. Returns the exit status."""
    import uvicorn

    from engine.limits import parse_limits
    from entrypoints.router.app import Router

    router = Router(options.prefill, options.decode, parse_limits(options.limits or ()))
    config = uvicorn.Config(
        router.app(),
        log_config=None,
        log_level="warning",
        server_header=False,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        timeout_graceful_shutdown=int(options.shutdown_timeout),
    )
    host, port = listener.getsockname()[:2]
    kinds = len(options.prefill), len(options.decode)
    logger.info("ready: http://%s:%d passes on to %d prefill and %d decode servers", host, port, *kinds)
    server = uvicorn.Server(config)
    await server.serve(sockets=[listener])
    return 0 if server.started else 1


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
