"""What a request says of keys and values that another engine computes: names and meanings are vLLM's, so that proxies
made for it pass them on unchanged."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from engine.errors import InvalidRequestError

FIELD = "kv_transfer_params"
_Name = Annotated[str, msgspec.Meta(max_length=512)]
_Id = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^[\w.:/+=-]*$")]
"""is written to whoever listens where a request says that pages are: nothing that other protocols take for lines"""
_Block = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """Of a request: compute the prompt for somebody else (`do_remote_decode`), or take what another engine has computed
    of it (`do_remote_prefill`). What an engine answers to the first is what it is asked with by the second."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: _Id | None = None
    """of one start of an engine: a restarted one has another"""
    remote_request_id: _Id | None = None
    """what the pages are leased under; nobody guesses it"""
    remote_block_ids: list[_Block | list[_Block]] | None = None
    """told for proxies that look at it; pages are asked for by what they hold"""
    remote_host: _Name | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1


_SOURCE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""where the pages are"""


def parse_kv_transfer_params(value: object) -> KVTransferParams | None:
    """None where nothing is asked for. Keys that are not ours are a proxy's own, and pass beside ours. Raises
    `InvalidRequestError`."""
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{FIELD} must be an object, got {type(value).__name__}", FIELD)
    if value.keys().isdisjoint({"do_remote_decode", "do_remote_prefill"}):
        raise InvalidRequestError(
            f"{FIELD} has neither do_remote_decode nor do_remote_prefill: say what is wanted, or leave it out", FIELD
        )
    try:
        params = msgspec.convert(value, KVTransferParams)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{FIELD}: {error}", FIELD) from None
    if params.do_remote_decode and params.do_remote_prefill:
        raise InvalidRequestError(f"{FIELD}: do_remote_decode and do_remote_prefill exclude each other", FIELD)
    missing = [name for name in _SOURCE if getattr(params, name) is None]
    if params.do_remote_prefill and missing:
        raise InvalidRequestError(
            f"{FIELD}: do_remote_prefill needs {', '.join(missing)}: pass on all that the prefill server answered",
            FIELD,
        )
    return params if params.do_remote_decode or params.do_remote_prefill else None


def as_answer(params: KVTransferParams) -> dict[str, Any]:
    """As a client is told."""
    answer: dict[str, Any] = msgspec.to_builtins(params)
    return answer
