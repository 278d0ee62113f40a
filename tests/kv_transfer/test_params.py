"""`kv_transfer_params` of a request: what is asked for, or what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.kv_transfer.params import parse_kv_transfer_params

HANDED: dict[str, Any] = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "1.x",
    "remote_host": "h",
    "remote_port": 1,
}


def test_what_asks_for_nothing_is_nothing_and_keys_of_proxies_pass() -> None:
    for nothing in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False}):
        assert parse_kv_transfer_params(nothing) is None
    for asked in ({"do_remote_decode": True, "proxys_own": 3}, HANDED):
        assert parse_kv_transfer_params(asked) is not None


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ("x", "must be an object"),
        ({"nonsense": 1}, "neither do_remote_decode nor do_remote_prefill"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({**HANDED, "do_remote_decode": True}, "exclude each other"),
        ({"do_remote_prefill": True, "remote_port": 1}, "needs remote_engine_id, remote_request_id, remote_host: pass"),
        ({**HANDED, "remote_port": None}, "needs remote_port: pass"),
        ({**HANDED, "remote_engine_id": "x\r\nSET a b\r\n"}, "remote_engine_id"),
        ({**HANDED, "remote_request_id": "1.a b"}, "remote_request_id"),
        ({**HANDED, "tp_size": 1 << 70}, "tp_size"),
        ({**HANDED, "remote_block_ids": [[1, 1 << 63]]}, "remote_block_ids"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(params: object, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        parse_kv_transfer_params(params)
