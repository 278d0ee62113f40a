"""The file of `--keys`: read, read again, and what is wrong with it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from test_keys import entry

from engine.errors import ConfigError
from entrypoints.server.keys import Keyring, read_keys
from entrypoints.server.quotas import RateLimitedError


def test_the_file_is_read_again_and_what_is_wrong_with_it_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("a", requests_per_minute=2))
    keyring = Keyring(file=file)
    client = keyring.find(b"a")
    assert client is not None and keyring.find(b"b") is None
    with client.one(), client.one(), pytest.raises(RateLimitedError), client.one():
        pass
    _rewrite(file, entry("a", requests_per_minute=3, weight=2) + entry("b"))
    keyring.look_again(10.0)
    assert keyring.find(b"a") is client and client.tenant.weight == 2 and keyring.find(b"b") is not None
    with client.one():
        pass
    with pytest.raises(RateLimitedError), client.one():
        pass
    _rewrite(file, entry("b") + "what = is this")
    keyring.look_again(10.5)
    assert not caplog.records, "it looks once a second"
    keyring.look_again(11.5)
    assert "the keys before it stay" in caplog.text and keyring.find(b"a") is client
    _rewrite(file, entry("b"))
    keyring.look_again(11.6, anyway=True)
    assert keyring.find(b"a") is None and keyring.find(b"b") is not None
    assert [each.name for each in keyring.clients] == ["a", "b"], "what was used is still shown"


def _rewrite(file: Path, text: str) -> None:
    other = file.with_suffix(".new")
    other.write_text(text)
    os.replace(other, file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "keys"),
        ("keys = []", "length >= 1"),
        (entry("a") + entry("a"), "2 keys have the name a"),
        (entry("a") + entry("b").replace(hashlib.sha256(b"b").hexdigest(), hashlib.sha256(b"a").hexdigest()), "sha256"),
        (entry("a", scopes=["root"]), "root"),
        (entry("a", weight=0), "weight"),
        (entry("a", requests_per_minute=0), "requests_per_minute"),
        (entry("a", limit=3), "limit"),
        (entry("no blanks"), "name"),
        (entry("a").replace('sha256 = "', 'sha256 = "zz'), "sha256"),
        ("[[keys]", "keys.toml"),
        ("\xff", "keys.toml"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="--keys") as error:
        read_keys(file)
    assert says in str(error.value)
    with pytest.raises(ConfigError, match="nowhere"):
        read_keys(tmp_path / "nowhere")


def test_a_key_that_is_gone_or_renewed_is_worth_nothing_to_who_has_it_open(tmp_path: Path) -> None:
    """As WebSockets do, which ask at each turn."""
    file = tmp_path / "keys.toml"
    file.write_text(entry("a", requests_per_minute=2) + entry("b"))
    keyring = Keyring(file=file)
    old, gone = keyring.find(b"a"), keyring.find(b"b")
    assert old is not None and gone is not None
    with old.one():
        pass
    digest = hashlib.sha256(b"a").hexdigest()
    _rewrite(file, entry("a", requests_per_minute=2).replace(digest, hashlib.sha256(b"new").hexdigest()))
    keyring.look_again(10.0)
    assert not old.scopes and not gone.scopes and keyring.find(b"a") is None
    new = keyring.find(b"new")
    assert new is not None and new.scopes == {"infer"} and new.requests == 1
    with new.one():
        pass
    with pytest.raises(RateLimitedError), new.one():
        pass
