"""GPT-OSS's attention block computes what transformers' does: norm, biases, YaRN, window, sinks, output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer, GptOssRotaryEmbedding

from attention_backends.cpu import CpuBackend
from attention_backends.interface import AttentionBatch
from attention_backends.registry import select
from engine.config import EngineArgs, EngineConfig
from engine.errors import ConfigError
from engine.models import description
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.families.common import Family
from engine.models.families.gpt_oss import gpt_oss_attention_spec
from engine.models.families.names import LLAMA_NAMES
from engine.resolve import resolve_here
from engine.runner.loading import load_parts
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_attention import PagedAttention, attention_layers
from engine.weights import loader

TOKENS, WINDOW, BLOCK = 40, 16, 16
CONFIG = GptOssConfig(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_local_experts=2,
    num_experts_per_tok=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    sliding_window=WINDOW,
    max_position_embeddings=8192,
    attn_implementation="eager",
)


def reference_layer(index: int) -> GptOssDecoderLayer:
    layer = GptOssDecoderLayer(CONFIG, index)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(1.0 if "layernorm" in name else 0.0, 0.2)
        layer.self_attn.sinks.normal_(0.0, 2.0)
    return layer


def expected_block(layer: GptOssDecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    hidden_keys = (key > query) | (key <= query - (layer.self_attn.sliding_window or TOKENS))
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(hidden_keys, -torch.inf)
    positions = GptOssRotaryEmbedding(CONFIG)(hidden, torch.arange(TOKENS)[None])
    with torch.no_grad():
        attended, _ = layer.self_attn(layer.input_layernorm(hidden[None]), positions, mask)
    return hidden + attended[0]


def filled(layers: list[GptOssDecoderLayer]) -> Decoder:
    """A decoder with the layers' attention, the rest as it happens to be."""
    spec = gpt_oss_attention_spec(CONFIG.to_dict())
    model = Decoder(spec, dtype=torch.float32, max_position=TOKENS)
    with torch.no_grad():
        for name, row in LLAMA_NAMES.rows(spec).items():
            if "self_attn" in name or "input_layernorm" in name:
                _, _, index, rest = name.split(".", 3)
                place = model.get_parameter(row.parameter)[row.start : row.start + row.count]
                place.copy_(layers[int(index)].get_parameter(rest))
    return model


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_attention_block_equals_transformers(backend: str, native_cache: Path) -> None:
    torch.manual_seed(0)
    references = [reference_layer(index) for index in range(2)]
    model = filled(references)
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    assert [layer.window for layer in model.spec.facts.layers] == [WINDOW, None]
    sinks = [layer.sinks for layer in layers if layer.sinks is not None]
    chosen = select(
        "cpu", torch.float32, 32, BLOCK, True, False, name=backend, cache_dir=native_cache, needs_sinks=True
    ).backend
    attention = PagedAttention(chosen, attention_layers(model.spec.facts, sinks), torch.float32)
    attention.allocate(TOKENS // BLOCK + 1, 0, BLOCK, torch.device("cpu"))
    attention.begin_step([one_prompt()])
    (rope,) = model.ropes
    hidden = torch.randn(TOKENS, CONFIG.hidden_size)
    with torch.inference_mode():
        for index, layer in enumerate(layers):
            found = layer.attention(hidden, rope.table, attention.attend, index)
            expected = expected_block(references[index], hidden)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            without = expected_block_without_sinks(references[index], hidden)
            assert (expected - without).abs().max() > 0.05, "sinks are seen"


def expected_block_without_sinks(layer: GptOssDecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
    kept = layer.self_attn.sinks.detach().clone()
    with torch.no_grad():
        layer.self_attn.sinks.fill_(-torch.inf)
        result = expected_block(layer, hidden)
        layer.self_attn.sinks.copy_(kept)
    return result


def one_prompt() -> AttentionBatch:
    return AttentionBatch(
        num_seqs=1,
        num_tokens=TOKENS,
        max_query_len=TOKENS,
        max_seq_len=TOKENS,
        query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
        block_tables=torch.arange(TOKENS // BLOCK + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(TOKENS),
        block_size=BLOCK,
        query_lens_host=(TOKENS,),
        seq_lens_host=(TOKENS,),
    )


@pytest.fixture
def model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GPT-OSS's config, under a family that takes its attention and an MLP that exists here."""
    family = Family("gpt_oss", "GptOssForCausalLM", gpt_oss_attention_spec, LLAMA_NAMES.rows)
    monkeypatch.setattr(description, "find_family", lambda config: (family, True))
    monkeypatch.setattr(loader, "family_named", lambda name: family)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG.to_dict(), "dtype": "float32"}, default=str))
    return tmp_path


def configured(model_path: Path, backend: str) -> EngineConfig:
    args = EngineArgs(
        model=str(model_path), load_format="dummy", device="cpu", dtype="float32", compile="none", max_model_len=64,
        attention_backend=backend, cache_dir=str(model_path / "cache"),
    )  # fmt: skip
    return resolve_here(args)[1]


def test_a_backend_without_sinks_is_rejected_by_name(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    able = replace(CpuBackend.capabilities(), sinks=False)
    monkeypatch.setattr(CpuBackend, "capabilities", lambda: able)
    with pytest.raises(ConfigError, match="cpu: has no attention sinks"):
        load_parts(configured(model_path, "cpu"))


def test_a_runner_gives_the_backend_each_layers_sinks(model_path: Path) -> None:
    runner = ModelRunner.load(configured(model_path, "reference"))
    model = runner._model
    assert isinstance(model, Decoder)
    for layer, given in zip(model.layers, runner._attention._layers, strict=True):
        assert given.sinks is layer.sinks is not None


def test_sinks_cannot_be_forgotten() -> None:
    spec = gpt_oss_attention_spec(CONFIG.to_dict())
    with pytest.raises(ValueError, match="sinks"):
        attention_layers(spec.facts)
