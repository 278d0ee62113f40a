"""Models by name, from a hub on loopback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import COMMIT, Home, serving_hub

from engine.errors import ConfigError
from engine.hub import HubName, hub_name

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 1,
}
RESOLVE = """
import sys
from engine.config import EngineArgs
from engine.resolve import resolve_here
description, config = resolve_here(EngineArgs(model=sys.argv[1], device="cpu"))
print(config.model.served_name, config.model.path == description.path, config.model.tokenizer == description.path)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    root = tmp_path / "hub"
    plain = root / "org" / "plain"
    (plain / "original").mkdir(parents=True)
    (plain / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "chat_template.jinja", "model.py", "pytorch_model.bin", "README.md"):
        (plain / name).write_text("{}")
    (plain / "model.safetensors").write_bytes(os.urandom(400_000))
    (plain / "consolidated.safetensors").write_bytes(b"the same once more")
    (plain / "original" / "model.safetensors").write_bytes(b"and again")
    for folder in ("1_Pooling", "onnx"):
        (plain / folder).mkdir()
        (plain / folder / "config.json").write_text("{}")
    (plain / "2_Dense").mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (plain / "2_Dense" / name).write_text("{}")
    quantized = root / "org" / "quantized"
    quantized.mkdir(parents=True)
    for name in ("Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf", "Tiny-F16-00001-of-00002.gguf", "mmproj-Tiny.gguf"):
        (quantized / name).write_bytes(name.encode() * 100)
    with serving_hub(root) as hub:
        yield Home(hub, tmp_path / "home")


def test_only_weights_and_texts_are_fetched(home: Home) -> None:
    place = Path(home.fetch("org/plain"))
    names = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "1_Pooling/config.json"}
    names |= {"2_Dense/config.json", "2_Dense/model.safetensors"}
    assert read_in(place) == names
    assert (place / "model.safetensors").read_bytes() == (home.hub.root / "org/plain/model.safetensors").read_bytes()
    assert not any(
        name in request for request in home.hub.requests for name in (".py", ".bin", "GET org/plain/resolve/README")
    )
    assert read_in(Path(home.fetch("org/plain", None))) == names


def read_in(place: Path) -> set[str]:
    return {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()}


def test_a_name_is_what_is_served(home: Home) -> None:
    assert home.run(RESOLVE, "org/plain") == "org/plain True True"


def test_a_transfer_that_breaks_off_goes_on(home: Home) -> None:
    home.hub.breaks = 2
    place = home.fetch("org/plain")
    if place.startswith("REFUSED"):  # the library's patience is its own; what has come is kept
        assert "a next start goes on" in place
        place = home.fetch("org/plain")
    assert home.hub.breaks == 0
    assert (Path(place) / "model.safetensors").read_bytes() == (
        home.hub.root / "org/plain/model.safetensors"
    ).read_bytes()


def test_what_was_fetched_needs_no_hub(home: Home) -> None:
    place = home.fetch("org/plain")
    assert home.fetch("org/plain", HF_HUB_OFFLINE="1") == place
    assert home.fetch("org/plain", HF_ENDPOINT="http://127.0.0.1:9") == place
    for more in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert "no hub can be asked" in home.fetch("org/quantized:Q8_0", **more)


def test_gguf_files_by_their_quantization(home: Home) -> None:
    for model in (
        "org/quantized:q4_k_m",
        "hf://org/quantized/Tiny-Q4_K_M.gguf",
        f"hf://org/quantized@{COMMIT}/Tiny-Q4_K_M.gguf",
    ):
        place = Path(home.fetch(model))
        assert place.name == "Tiny-Q4_K_M.gguf" and place.read_bytes().startswith(b"Tiny-Q4_K_M.gguf")
        assert [file.name for file in place.parent.iterdir()] == [place.name]
    for model in ("org/quantized", "org/quantized:Q5_0", "hf://org/quantized/no.gguf"):
        refused = home.fetch(model)
        assert refused.startswith("REFUSED name one of the GGUF files") and "Tiny-Q8_0.gguf (" in refused
        assert "mmproj" not in refused and "00001" not in refused


def test_what_does_not_fit_is_refused_before_it_is_fetched(home: Home) -> None:
    refused = home.fetch("org/plain", 250_000)
    assert "does not fit" in refused and "--quantization int8" in refused and "int4" in refused
    assert "int8" not in home.fetch("org/plain", 150_000).partition("it would")[2]
    assert "does not fit" in home.fetch("org/plain", 150_000, quant="int8")
    assert not any(request.startswith("GET org/") for request in home.hub.requests)
    assert Path(home.fetch("org/plain", 250_000, quant="int8")).is_dir()


def test_why_nothing_comes_is_said(home: Home) -> None:
    assert "no repository that the hub shows" in home.fetch("org/nobody")
    assert "--revision" in home.fetch("org/plain", revision="no-such-branch")
    home.hub.gated = True
    assert "HF_TOKEN" in home.fetch("org/quantized:Q8_0")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("a/b.c-GGUF:Q4_K_M", HubName("a/b.c-GGUF", "Q4_K_M")),
        ("hf://a/b", HubName("a/b")),
        ("hf://a/b@main/x.gguf", HubName("a/b", None, "x.gguf", "main")),
        ("/a/b", None),
        ("./a", None),
        ("../a/b", None),
        ("a/b/c", None),
        ("a", None),
        ("a/b.gguf", None),
        ("~/a", None),
        ("", None),
    ],
)
def test_what_is_a_name_and_what_a_path(model: str, name: HubName | None) -> None:
    assert hub_name(model) == name


def test_a_directory_that_is_here_comes_before_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "plain").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/plain") is None
    with pytest.raises(ConfigError, match="hf://ORG/NAME"):
        hub_name("hf://plain")
