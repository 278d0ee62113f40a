"""Options in a file and in the environment: the same as on the command line, which comes before them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from entrypoints.serve import build_parser
from entrypoints.sources import parse_all


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
    assert found == expected


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
        ("max-modle-len: 5", "there is no option max-modle-len; is it max-model-len?"),
        ("port: many", "argument --port"),
        ("strict-fields: maybe", "strict-fields must be true or false, got 'maybe'"),
        ("- port", "must hold names of options"),
        ("1: 2", "must hold names of options"),
        ("''", "must hold names of options"),
        ("a: [", "cannot read"),
        ("config: other.yaml", "there is no option config"),
        ("a: &x [*x]", "there is no option a"),
        ("!!python/object/apply:os.system ['true']", "cannot read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    with pytest.raises(SystemExit):
        parsed(config(tmp_path, text))
    assert says in capsys.readouterr().err


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
