"""The command lines: quick help, options that act or are refused."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineArgs
from entrypoints import serve
from entrypoints.bench import cli
from entrypoints.options import add_engine_options, engine_args, size_bytes


@pytest.mark.parametrize("door", ["entrypoints.serve", "entrypoints.chat", "entrypoints.bench.cli"])
def test_help_imports_nothing_heavy(door: str) -> None:
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module({door!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'pydantic', 'uvicorn', 'numpy', 'httpx', 'zmq'}\n"
        "sys.exit(','.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["m", "--max-modle-len", "5"], "unrecognized arguments: --max-modle-len 5 (did you mean --max-model-len"),
        (["m", "--max_modle_len=5"], "--max-modle-len=5 (did you mean --max-model-len"),
        (["m", "--xyzzy"], "unrecognized arguments: --xyzzy; engine-serve --help"),
        (["m", "--port", "abc"], "argument --port: 'abc' is not a port: 0 to 65535; engine-serve --help"),
    ],
)
def test_a_wrong_option_is_told_in_a_line_with_what_may_be_meant(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.build_parser().parse_args(given)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and told in error, error


def test_a_wrong_option_of_a_command_finds_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(["throughput", "m", "--num-promtps=3"])
    assert "(did you mean --num-prompts" in capsys.readouterr().err


def test_every_engine_option_is_a_setting_and_every_setting_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    options = {action.dest for action in parser._actions if not action.dest.startswith("vllms_")} - {"help"}
    settings = {f.name for f in msgspec.structs.fields(EngineArgs)} - {"model", "served_model_name"}
    assert options == settings


def test_defaults_of_options_are_those_of_the_settings() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    made = engine_args(parser.parse_args(["--cache-dir", "c"]), "m")
    assert made == EngineArgs(model="m", cache_dir="c")


def test_the_demo_answers_with_what_its_authors_recommend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.frontend.demo.demo_model_path", lambda: "demo.gguf")
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    made = engine_args(parser.parse_args([]), None)
    assert (made.model, made.override_generation_config) == ("demo.gguf", {"temperature": 0.2, "top_p": 0.9})
    asked = parser.parse_args(["--override-generation-config", '{"temperature": 0.7, "top_k": 5}'])
    assert engine_args(asked, None).override_generation_config == {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    assert engine_args(asked, "m").override_generation_config == {"temperature": 0.7, "top_k": 5}


def test_sizes_are_read_in_both_units() -> None:
    assert [size_bytes(t) for t in ("4GiB", "512M", "1000", "1.5kib")] == [4 * 2**30, 512 * 10**6, 1000, 1536]
    for wrong in ("4 apples", "", "GiB"):
        with pytest.raises(argparse.ArgumentTypeError):
            size_bytes(wrong)


@pytest.mark.parametrize(
    ("door", "arguments", "option"),
    [
        ("chat", ["--url", "http://127.0.0.1:1", "--dtype", "float32"], "--dtype"),
        ("chat", ["--url", "http://127.0.0.1:1", "--no-prefix-caching"], "--no-prefix-caching"),
        ("chat", ["--api-key", "k"], "--api-key"),
        ("bench", ["throughput", "--workload", "W1", "--input-len", "3"], "--input-len"),
        ("bench", ["serve", "--workload", "W1", "--request-rate", "3"], "--request-rate"),
        ("bench", ["serve", "--num-prompts", "0"], "--num-prompts"),
        ("serve", ["--allowed-origins", "*"], "--allowed-origins"),
        ("serve", ["--allowed", "[]"], "--allowed"),
        ("serve", ["a", "--model", "b"], "two models are named, a and b"),
        ("serve", ["--override-generation-config", "0.7"], "--override-generation-config"),
        ("serve", ["--override-generation-config", "[" * 100_000], "--override-generation-config"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(
    door: str, arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from entrypoints import chat, serve
    from entrypoints.bench import cli

    main = {"chat": chat.main, "bench": cli.main, "serve": serve.main}[door]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and option in capsys.readouterr().err


@pytest.mark.parametrize("door", ["serve", "chat", "latency", "throughput", "profile"])
def test_every_door_takes_the_model_by_place_and_by_name_and_options_with_underscores(door: str) -> None:
    from entrypoints import chat
    from entrypoints.bench import cli

    build = {"serve": serve.build_parser, "chat": chat.build_parser}.get(door, cli.build_parser)
    command = [] if door in ("serve", "chat") else [door]
    for model in (["m"], ["--model", "m"], ["m", "-m", "m"]):
        for at in (0, 2):
            line = ["--max_model_len", "512"]
            line[at:at] = model
            made = build().parse_args([*command, *line, "--no_enable_prefix_caching"])
            assert (made.model, made.max_model_len, made.enable_prefix_caching) == ("m", 512, False)
    assert build().parse_args(command).model is None


def test_a_list_of_cores_reads_numbers_and_ranges() -> None:
    import argparse

    from entrypoints.options import core_list

    assert core_list("0,2-4") == (0, 2, 3, 4) and core_list("7") == (7,)
    for text in ("", "a", "1-", "0,,1"):
        with pytest.raises(argparse.ArgumentTypeError, match="list of CPUs"):
            core_list(text)


def test_of_several_names_the_first_is_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = serve.build_parser()
    several = parser.parse_args(["m", "--served-model-name", "a", "b", "c"])
    assert engine_args(several, "m").served_model_name == "a" and several.model_aliases == ("b", "c")
    one, none = parser.parse_args(["--served-model-name", "a", "--port", "1"]), parser.parse_args(["m"])
    assert (one.served_model_name, one.model_aliases) == ("a", ())
    assert (none.served_model_name, none.model_aliases) == (None, ())
    with pytest.raises(SystemExit):
        serve.main(["--served-model-name", "a", str(tmp_path)])
    assert "put the model before it" in capsys.readouterr().err
