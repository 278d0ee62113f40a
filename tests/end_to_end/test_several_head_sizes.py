"""Models whose layers differ in heads and windows, served by the whole engine from pages of one size: the tokens of a
dense loop over one sequence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from tiny_families import save_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "models"))
from dense_attention import greedy

from engine import LLM, SamplingParams
from engine.models import description
from engine.models.decoder import Decoder
from engine.models.families.common import Config, Family
from engine.models.families.names import LLAMA_NAMES
from engine.models.families.registry import Found
from engine.models.mixers import MixerSpec
from engine.models.spec import DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from engine.weights import loader

WINDOW, BLOCK, STEP, COUNT = 40, 8, 64, 20
LENGTHS = (5, 39, 40, 41, 64, 150, 333)
ROPES = (RopeSpec(rotary_dim=16), RopeSpec(rotary_dim=64, theta=1e6), RopeSpec(rotary_dim=32))
LOCAL = MixerSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=0, window=WINDOW)
WIDE = MixerSpec(num_heads=2, num_kv_heads=1, head_dim=64, scale=0.125, rope=1)
"""keeps twice as much of a token"""
NARROW = MixerSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, rope=0)
"""half as much"""
ODD = MixerSpec(num_heads=3, num_kv_heads=3, head_dim=32, scale=0.2, rope=2, window=2 * WINDOW)
"""three times as much"""
SHARE_LOCAL, SHARE_WIDE = replace(LOCAL, shares=2, qk_norm="head"), replace(WIDE, shares=1)
"""have queries alone"""
MODELS = {
    "wide heads see all": [LOCAL, LOCAL, WIDE] * 2,
    "narrow heads see all": [LOCAL, LOCAL, LOCAL, NARROW, NARROW],
    "sizes that do not add up": [LOCAL, ODD, WIDE, NARROW, LOCAL],
    "some share": [LOCAL, WIDE, LOCAL, SHARE_LOCAL, SHARE_WIDE, SHARE_LOCAL],
    "chunks": [replace(LOCAL, window=None, chunk=48), WIDE, replace(LOCAL, window=None, chunk=20), NARROW],
    "all see all": [replace(LOCAL, window=None), WIDE, NARROW],
}
PAGE_ELEMENTS = {  # of a token's keys and values
    "wide heads see all": 2 * 128,
    "narrow heads see all": 2 * 32,
    "sizes that do not add up": 2 * 96,
    "some share": 2 * 64,
    "chunks": 2 * 80,
    "all see all": 2 * 112,
}


def spec_of(mixers: list[MixerSpec]) -> DecoderSpec:
    return DecoderSpec(
        family="llama",
        vocab_size=259,
        hidden_size=48,
        layers=tuple(LayerSpec(mixer=mixer, mlp=MlpSpec(intermediate_size=64)) for mixer in mixers),
        ropes=ROPES,
        norm_eps=1e-5,
        max_position=512,
    )


def save(spec: DecoderSpec, path: Path) -> Decoder:
    """Random weights, under Llama's names."""
    model = Decoder(spec, dtype=torch.float32, max_position=512)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.3, generator=generator)
    tensors = {}
    for name, row in LLAMA_NAMES.rows(spec).items():
        tensors[name] = model.get_parameter(row.parameter)[row.start : row.start + row.count].detach().clone()
    save_file(tensors, path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": spec.vocab_size}
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512, "torch_dtype": "float32"}))
    save_tokenizer(path)
    return model


class Served:
    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.spec = name, path, spec_of(MODELS[name])
        model = save(self.spec, path)
        self.prompts = [[3 + (11 * n + 7 * i * i) % 250 for i in range(n)] for n in LENGTHS]
        with torch.inference_mode():
            self.expected = [greedy(model, prompt, COUNT) for prompt in self.prompts]
        assert min(len(set(tokens)) for tokens in self.expected) > COUNT / 3

    def open(self, **options: Any) -> LLM:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": 400,
            "max_num_seqs": 8,
            "max_num_batched_tokens": STEP,
            "kv_cache_memory": 1 << 24,
            "block_size": BLOCK,
            "compile": "none",
        }
        return LLM(str(self.path), **{**settings, **options})

    @property
    def page_bytes(self) -> int:
        return 4 * BLOCK * PAGE_ELEMENTS[self.name]


@pytest.fixture(scope="module", params=list(MODELS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def family(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(config: Config) -> DecoderSpec:
        return served.spec

    family = Family("llama", "LlamaForCausalLM", spec, LLAMA_NAMES.rows)
    monkeypatch.setattr(description, "find_family", lambda config: Found(family, "generates"))
    monkeypatch.setattr(loader, "family_named", lambda name: family)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"compile": "pieces"},
        pytest.param({"attention_backend": "reference"}, marks=pytest.mark.exhaustive),
    ],
    ids=["plain", "ahead", "pieces", "reference"],
)
def test_chunked_and_from_prefixes_they_are_the_dense_tokens(served: Served, options: dict[str, Any]) -> None:
    with served.open(**options) as llm:
        assert tokens_of(llm, served.prompts) == served.expected
        assert tokens_of(llm, served.prompts) == served.expected, "prefixes are found in every group"
        assert llm.stats().prefix_hit_tokens > sum(LENGTHS) / 2
        assert llm.stats().kv_blocks_used == 0
        assert llm.ready.num_blocks == (1 << 24) // served.page_bytes


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_they_are_the_same(served: Served, preemption: str) -> None:
    pages = 26 * len({mixer.span for mixer in MODELS[served.name]})
    options = {"preemption": preemption, "swap_space": 300 * served.page_bytes if preemption == "swap" else 0}
    short = sum(n < 160 for n in LENGTHS)
    with served.open(
        max_model_len=180, max_num_seqs=32, kv_cache_memory=2 * pages * served.page_bytes, **options
    ) as llm:
        assert tokens_of(llm, served.prompts[:short] * 3) == served.expected[:short] * 3
        stats = llm.stats()
        assert stats.preemptions > 0
        assert stats.preemptions_swapped == (stats.preemptions if preemption == "swap" else 0)
        assert stats.host_blocks_used == stats.kv_blocks_used == 0
