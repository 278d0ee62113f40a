"""The file of `--keys`: read, read again, and what is wrong with it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from test_keys import entry

from engine.errors import ConfigError
from entrypoints.server.keys import Key, Keyring, read_keys
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
        ("", "tables [[keys]] with name and sha256, and nothing else, got 0 of them"),
        ("keys = []", "it must hold 1 to 10000 tables [[keys]]"),
        ("keys = 3", "got keys that are none"),
        ("keys = ['secret']", "key 1 must be a table [[keys]] with name and sha256"),
        ("others = 1\n" + entry("a"), "got others"),
        (entry("a") + entry("a"), "2 keys have the name a"),
        (entry("a") + entry("b").replace(hashlib.sha256(b"b").hexdigest(), hashlib.sha256(b"a").hexdigest()), "sha256"),
        (entry("a") + entry("b", scopes=["root"]), "key 2 (b): scopes must be a list of infer, metrics and admin"),
        (entry("a", scopes="infer"), "or of some of them, got 'infer'"),
        (entry("a", weight=0), "key 1 (a): weight must be a number from 0.001 to 1000, got 0"),
        (entry("a", requests_per_minute=0), "requests_per_minute must be a whole number from 1 to 2**53, got 0"),
        (entry("a", limit=3), "key 1 (a): there is no field limit; there are name, sha256, scopes"),
        (entry("a", scope=["infer"]), "key 1 (a): there is no field scope; is it scopes?"),
        (entry("no blanks"), "key 1: name must be 1 to 64 letters, digits and _.@:-"),
        (entry("a").replace('sha256 = "', 'sha256 = "zz'), "key 1 (a): sha256 must be the 64 hex digits that"),
        (entry("a").replace('sha256 = "', 'sha256 = "zz'), "sha256sum` prints, got 66 characters"),
        ('[[keys]]\nname = "a"', "key 1 (a): sha256 is missing: the 64 hex digits that"),
        (entry("a").replace('name = "a"', ""), "key 1: name is missing"),
        ("[[keys]", "keys.toml"),
        ("\xff", "keys.toml"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="--keys") as error:
        read_keys(file)
    assert says in str(error.value) and "secret" not in str(error.value)
    assert not any(each in str(error.value) for each in ("$.", "^", "regex", "`object`"))
    with pytest.raises(ConfigError, match="nowhere"):
        read_keys(tmp_path / "nowhere")


def test_each_field_says_how_it_must_look(tmp_path: Path) -> None:
    for field in Key.__struct_fields__:
        file = tmp_path / "keys.toml"
        lines = [line for line in entry("a").splitlines() if not line.startswith(f"{field} =")]
        file.write_text("\n".join([*lines, f"{field} = {{}}"]))
        with pytest.raises(ConfigError, match=f": {field} must be "):
            read_keys(file)


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
    assert new is not None and new.scopes == {"infer"} and new.used.requests == 1
    old.use(5, 2, 3)  # of what was under way
    assert (new.used.prompt_tokens, new.used.cached_tokens, new.used.generated_tokens) == (5, 2, 3)
    with new.one():
        pass
    with pytest.raises(RateLimitedError), new.one():
        pass
