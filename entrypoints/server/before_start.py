"""What can be found wrong with a server's options before anything is loaded: a start, and `--check`, look here."""

from __future__ import annotations

import argparse
import os
import ssl
from collections import Counter
from pathlib import Path

from engine.dialects.resolve import dialect_of
from engine.errors import ConfigError
from entrypoints.server.api_key import take_keys
from entrypoints.server.counts import SharedMemory
from entrypoints.server.keys import Keyring
from entrypoints.server.tracing import check_tracing


def check_options(options: argparse.Namespace, memory: SharedMemory | None = None) -> Keyring | None:
    """Returns the keys; `memory`: as `Keyring`'s. Raises `ConfigError`."""
    check_speech(options)
    if options.otlp_endpoint is not None:
        check_tracing(options.otlp_endpoint)
    if options.pinned_prefixes is not None and not options.pinned_prefixes.is_file():
        raise ConfigError(f"--pinned-prefixes: there is no file {options.pinned_prefixes}")
    if options.enable_sleep_mode and options.core_restarts == 0:
        raise ConfigError("--enable-sleep-mode needs --core-restarts above 0: else the engine ends with its core")
    if options.profile_dir is not None:
        _check_directory("--profile-dir", options.profile_dir)
    check_adapters(options)
    _check_certificate(options)
    if options.api_server_count > 1:
        _check_several(options)
    return take_keys(options.api_key, options.api_key_file, options.keys, memory)


def _check_several(options: argparse.Namespace) -> None:
    """What one process does for its own requests."""
    for name in ("pinned_prefixes", "profile_dir"):
        if getattr(options, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is for one process that takes requests: leave --api-server-count out")


def _check_directory(option: str, path: Path) -> None:
    """It is there from now on, and may be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}") from None
    if not writable:
        raise ConfigError(f"{option}: {path} cannot be written to")


def check_adapters(options: argparse.Namespace) -> None:
    """As far as they can be without the model. Raises `ConfigError`."""
    if options.lora_modules and not options.enable_lora:
        raise ConfigError("--lora-modules: adapters are served with --enable-lora")
    names = [module.name for module in options.lora_modules]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"--lora-modules names {twice[0]!r} twice")
    for module in options.lora_modules:
        if not Path(module.path, "adapter_config.json").is_file():
            raise ConfigError(f"--lora-modules: {module.path}: no adapter_config.json (adapters are not downloaded)")


def check_speech(options: argparse.Namespace) -> None:
    """Names of parsers, and files of them. Raises `ConfigError`."""
    dialect_of(None, tool_parser=options.tool_call_parser, reasoning_parser=options.reasoning_parser)


def _check_certificate(options: argparse.Namespace) -> None:
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile has no effect without --ssl-certfile")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")  # nobody is asked for one
    except OSError as error:
        raise ConfigError(f"--ssl-certfile: {options.ssl_certfile} and its key cannot be read: {error}") from None
