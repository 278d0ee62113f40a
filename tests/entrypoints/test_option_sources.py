"""Options in a file and in the environment: the same as on the command line, which comes before them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import ConfigError
from entrypoints.serve import build_parser
from entrypoints.sources import Given, parse_again, parse_all, told


def parsed(*given: str, environment: dict[str, str] | None = None) -> argparse.Namespace:
    options: argparse.Namespace = parse_all(build_parser(), given, environment or {})
    return options


def config(tmp_path: Path, text: str) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return f"--config={file}"


ALL = """
model: org/name
host: 0.0.0.0
port: 9000
max-model-len: 4096
max_num_seqs: 8
served-model-name: [a, b]
prefix-caching: false
log-requests: true
strict-fields: true
allowed-origins: ["https://a.example"]
kv-cache-memory: 4GiB
limit: ["prompts=7", "messages=9"]
speculative-config: {method: ngram, num_speculative_tokens: 3}
override-generation-config: {temperature: 0}
"""


def test_a_file_says_what_a_command_line_says(tmp_path: Path) -> None:
    same = ["org/name", "--host", "0.0.0.0", "--port", "9000", "--max-model-len", "4096", "--max-num-seqs", "8"]
    same += ["--served-model-name", "a", "b", "--no-prefix-caching", "--log-requests", "--strict-fields"]
    same += ["--allowed-origins", '["https://a.example"]', "--kv-cache-memory", "4GiB", "--limit", "prompts=7"]
    same += ["--limit", "messages=9", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    same += ["--override-generation-config", '{"temperature": 0}']
    found, expected = vars(parsed(config(tmp_path, ALL))), vars(parsed(*same))
    assert found.pop("config") == tmp_path / "config.yaml" and expected.pop("config") is None
    assert found.pop("sources")["max_num_seqs"].endswith("config.yaml: max-num-seqs") and not expected.pop("sources")
    assert (found.pop("given").command_line, expected.pop("given").command_line) == ([config(tmp_path, ALL)], same)
    assert found == expected


def test_another_process_makes_the_same_of_it_whatever_the_sources_say_by_then(tmp_path: Path) -> None:
    options = parsed(config(tmp_path, ALL), "--port=7", environment={"PAGELOOM_SERVED_MODEL_NAME": "c"})
    (tmp_path / "config.yaml").unlink()
    given = msgspec.json.decode(msgspec.json.encode(options.given), type=Given)
    again = vars(parse_again(build_parser(), given))
    assert again == {name: value for name, value in vars(options).items() if name != "sources"}
    assert (again["port"], again["served_model_name"], again["max_num_seqs"]) == (7, "c", 8)


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, "model: of-file\nmax-model-len: 1\nmax-num-seqs: 2\nport: 3\nserved-model-name: [x, y]")
    environment = {"PAGELOOM_MAX_NUM_SEQS": "20", "PAGELOOM_PORT": "30", "PAGELOOM_MODEL": "of-environment"}
    options = parsed(file, "--port", "300", environment=environment)
    assert (options.max_model_len, options.max_num_seqs, options.port) == (1, 20, 300)
    assert options.model == "of-environment" and options.served_model_name == "x" and options.model_aliases == ("y",)
    assert parsed(file, "mine", environment=environment).model == "mine"
    assert parsed("mine", file, "--served-model-name", "z").served_model_name == "z"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("PAGELOOM_PREFIX_CACHING", "false", "enable_prefix_caching", False),
        ("PAGELOOM_STRICT_FIELDS", "1", "strict_fields", True),
        ("PAGELOOM_STRICT_FIELDS", "no", "strict_fields", False),
        ("PAGELOOM_SPECULATIVE_CONFIG", '{"method": "ngram"}', "speculative_config", {"method": "ngram"}),
        ("PAGELOOM_PORT", "tcp://10.0.0.7:8000", "port", 8000),
        ("PAGELOOM_SERVICE_HOST", "10.0.0.7", "host", "127.0.0.1"),
        ("PAGELOOM_API_KEY", "secret", "api_key", None),
        ("PAGELOOM_CONFIG", "nowhere", "config", None),
        ("PAGELOOM_PORT", "", "port", 8000),
        ("PAGELOOM_SEED", "", "seed", None),
    ],
)
def test_variables(variable: str, text: str, name: str, value: Any) -> None:
    assert vars(parsed(environment={variable: text}))[name] == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-modle-len: 5", "config.yaml: max-modle-len: there is no such option; is it max-model-len?"),
        ("port: many", "config.yaml: port: 'many' is not a port"),
        ("max_num_seqs: many", "config.yaml: max-num-seqs: invalid int value: 'many'"),
        ("served-model-name: []", "config.yaml: served-model-name: expected at least one argument"),
        ("api-key: a\napi-key-file: b", "argument --api-key-file: not allowed with argument --api-key"),
        ("strict-fields: maybe", "config.yaml: strict-fields: must be true or false, got 'maybe'"),
        ("max-num-seqs: 4\nport: 1\nmax-num-seqs: 5", "max-num-seqs stands twice, in lines 1 and 3"),
        ("max-num-seqs: 4\nmax_num_seqs: 4", "max-num-seqs stands twice, as max-num-seqs and max_num_seqs"),
        ("{port: 1, port: 2}", "port stands twice, in lines 1 and 1"),
        ("speculative-config:\n  method: ngram\n  method: mtp", "method stands twice, in lines 2 and 3"),
        ("- port", "must hold names of options"),
        ("1: 2", "must hold names of options"),
        ("''", "must hold names of options"),
        ("a: [", "cannot read"),
        ("config: other.yaml", "config: stands on the command line alone"),
        ("a: &x [*x]", "a: there is no such option"),
        ("!!python/object/apply:os.system ['true']", "cannot read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    with pytest.raises(SystemExit):
        parsed(config(tmp_path, text))
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("PAGELOOM_MAX_NUM_SEQS", "many", "PAGELOOM_MAX_NUM_SEQS: invalid int value: 'many'"),
        ("PAGELOOM_STRICT_FIELDS", "maybe", "PAGELOOM_STRICT_FIELDS: must be true or false, got 'maybe'"),
        ("PAGELOOM_SCHEDULING_POLICY", "x", "PAGELOOM_SCHEDULING_POLICY: invalid choice: 'x'"),
    ],
)
def test_a_variable_that_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], variable: str, text: str, says: str
) -> None:
    with pytest.raises(SystemExit):
        parsed(config(tmp_path, "max-num-seqs: 3\nport: 8000"), environment={variable: text})
    assert f"error: {says}" in capsys.readouterr().err


def test_what_the_engine_finds_wrong_is_told_behind_where_it_stands(tmp_path: Path) -> None:
    file, of_keys = config(tmp_path, "max-num-seqs: -3\nkeys: nowhere\nport: 9"), ConfigError("--keys: cannot read it")
    error, environment = ConfigError("max_num_seqs must be at least 1, got -3"), {"PAGELOOM_MAX_NUM_SEQS": "-3"}
    place = file.removeprefix("--config=")
    assert told(error, parsed(file)) == f"{place}: max-num-seqs: {error}"
    assert told(of_keys, parsed(file)) == f"{place}: keys: cannot read it"
    assert told(error, parsed(file, environment=environment)) == f"PAGELOOM_MAX_NUM_SEQS: {error}"
    assert told(error, parsed(file, "--max-num-seqs=-4", environment=environment)) == str(error)
    assert told(error, parsed(file, "--max-num-seqs", "-3", environment=environment)) == str(error)  # the same there
    assert told(ConfigError("swap_space must be at least 0"), parsed(file)) == "swap_space must be at least 0"
    assert told(ConfigError("'x' is no model"), parsed(file)) == "'x' is no model"


@pytest.mark.parametrize("text", ["", "# max-model-len: 4096\n", "---\n"])
def test_a_file_may_say_nothing(tmp_path: Path, text: str) -> None:
    assert vars(parsed(config(tmp_path, text)))["port"] == 8000


def test_a_variable_that_is_nearly_an_option_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    parsed(environment={"PAGELOOM_MAX_MODEL_LENGTH": "5", "PAGELOOM_SERVICE_PORT": "80", "PAGELOOM_PORT_80_TCP": "x"})
    assert capsys.readouterr().err == "PAGELOOM_MAX_MODEL_LENGTH is no option; is it PAGELOOM_MAX_MODEL_LEN?\n"


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--config", str(tmp_path / "nowhere.yaml"))
    assert "nowhere.yaml" in capsys.readouterr().err
