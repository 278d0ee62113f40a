"""The table of docs/models.md: every decoder, every feature, measured. A cell that is written there was run here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import GreedyOracle, first_difference
from tiny_families import save_tokenizer

sys.path += [str(Path(__file__).parents[1] / room) for room in ("models", "adapters")]
from gguf_models import write_gguf
from tiny_adapters import merged, request, save_adapter
from tiny_models import CASE_OF, hf_logits, make_model

from engine import LLM, LoRARequest, SamplingParams
from engine.adapters.config import LoRAConfig
from engine.adapters.targets import Targets
from engine.errors import ConfigError
from engine.llm import RequestOutput
from engine.models.description import describe
from engine.models.families.common import Family
from engine.models.families.registry import FAMILIES
from engine.models.gguf_config import ARCHITECTURES as GGUF_ARCHITECTURES
from engine.models.gguf_config import WITH_EXPERTS as GGUF_WITH_EXPERTS

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
DECODERS = [family for family in FAMILIES if family.causal]
FEATURES = ("parity", "chunked", "prefix", "preempt", "swap", "speculate", "int8", "LoRA", "GGUF")
GGUF_CASE_OF = {"llama4_text": "llama4_as_published"}
"""where files say less of a model than its config"""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
"""families that keep latents: `test_greedy_parity.py` has one of them"""
EXHAUSTIVE = (*LATENT, "bamba", "falcon_h1", "kimi_linear")
"""that run with --exhaustive: others do what they do"""
TOKENS, LENGTH = 24, 128
_GENERATOR = torch.Generator().manual_seed(5)
_PIECE = torch.randint(5, 199, (12,), generator=_GENERATOR).tolist()
PROMPTS = [torch.randint(5, 199, (size,), generator=_GENERATOR).tolist() for size in (3, 17, 40, 90, 64, 33)]
CROWD = [torch.randint(5, 199, (size,), generator=_GENERATOR).tolist() for size in range(1, 25)]
"""whose first tokens fit where what follows them does not"""
PROMPTS += [[*_PIECE, *_PIECE, *_PIECE[:5]], [*_PIECE, 7, *_PIECE, *_PIECE]]


class Subject:
    """A tiny model of a family, in files, with what transformers makes of it."""

    def __init__(self, family: Family, directory: Path, case: str) -> None:
        self.family = family
        self.model = make_model(case)
        self.path = directory
        self.model.save_pretrained(directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "architectures": [family.architecture]}))
        save_tokenizer(directory)
        self.oracles = [GreedyOracle(self.model, prompts, TOKENS) for prompts in (PROMPTS, CROWD)]

    def run(
        self,
        *,
        path: Path | None = None,
        rounds: int = 1,
        crowd: bool = False,
        adapter: LoRARequest | None = None,
        **settings: Any,
    ) -> tuple[list[RequestOutput], Any]:
        """What the engine generates (in the last round), checked, and its statistics."""
        oracle = self.oracles[crowd] if adapter is None else GreedyOracle(self.model, PROMPTS, TOKENS)
        options: dict[str, Any] = {"kv_cache_memory": 1 << 26, "dtype": "float32", **settings}
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in oracle.prompts]
        where = str(path or self.path)
        options = {"max_model_len": LENGTH, "tokenizer": str(self.path), **options}
        with LLM(where, device="cpu", compile="none", **options) as llm:
            for _ in range(rounds):
                outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
            stats = llm.stats()
        assert stats.kv_blocks_used == 0
        ours = [list(output.outputs[0].token_ids) for output in outputs]
        assert first_difference(ours, oracle.tokens(guesses=ours)) == ""
        return outputs, stats

    def small_pool(self) -> int:
        """Bytes for little more than one sequence of full length."""
        with pytest.raises(ConfigError) as refused:
            self.run(kv_cache_memory=1)
        found = re.search(r"kv_cache_memory to at least (\d+)", str(refused.value))
        assert found is not None
        return int(1.2 * int(found[1]))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=pytest.mark.exhaustive) if family.name in EXHAUSTIVE else family
        for family in DECODERS
    ],
    ids=lambda family: family.name,
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    name = request.param.name
    yield Subject(request.param, tmp_path_factory.mktemp(name), CASE_OF.get(name, name))


def test_parity(subject: Subject) -> None:
    subject.run()


@pytest.fixture
def some_families(subject: Subject, request: pytest.FixtureRequest) -> None:
    """By default every second or third, each feature others: what decides about steps does not depend on the family,
    and `test_family_parity.py` and `test_greedy_parity.py` have all of them."""
    every, turn = _TURNS[request.node.name.partition("[")[0]]
    if not request.config.getoption("exhaustive") and DECODERS.index(subject.family) % every != turn:
        pytest.skip("of some families, unless --exhaustive")


_TURNS = {
    "test_chunked": (2, 0),
    "test_prefix": (2, 1),
    "test_preempt": (3, 0),
    "test_swap": (3, 1),
    "test_speculate": (3, 2),
    "test_int8": (2, 0),
}


@pytest.mark.usefixtures("some_families")
def test_chunked(subject: Subject) -> None:
    _, stats = subject.run(max_num_batched_tokens=16)
    assert stats.steps > sum(map(len, PROMPTS)) // 16


@pytest.mark.usefixtures("some_families")
def test_prefix(subject: Subject) -> None:
    outputs, _ = subject.run(rounds=2)
    assert sum(output.num_cached_tokens for output in outputs) >= 16 * len(PROMPTS)


@pytest.mark.usefixtures("some_families")
def test_preempt(subject: Subject) -> None:
    _, stats = subject.run(crowd=True, kv_cache_memory=subject.small_pool(), preemption="recompute")
    assert stats.preemptions > 0


@pytest.mark.usefixtures("some_families")
def test_swap(subject: Subject) -> None:
    pool = subject.small_pool()
    _, stats = subject.run(crowd=True, kv_cache_memory=pool, preemption="swap", swap_space=1 << 26)
    assert stats.preemptions_swapped > 0


@pytest.mark.usefixtures("some_families")
def test_speculate(subject: Subject) -> None:
    _, stats = subject.run(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    assert stats.drafted_tokens > 0


@pytest.mark.usefixtures("some_families")
def test_int8(subject: Subject) -> None:
    """Prompts' log-probabilities: nearer to the float32 model's than those of a model whose layers say nothing."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8", "kv_cache_memory": 1 << 26}
    with LLM(str(subject.path), device="cpu", max_model_len=LENGTH, compile="none", **options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[2:5]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    errors, spread = [], []
    for prompt, output in zip(PROMPTS[2:5], outputs, strict=True):
        exact = hf_logits(subject.model, prompt).log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        ours = torch.tensor([each[token].logprob for token, each in zip(prompt[1:], output.prompt_logprobs[1:])])
        errors.append((ours - exact).abs().mean())
        spread.append((exact - exact.mean()).abs().mean())
    assert sum(errors) < 0.3 * sum(spread)


@pytest.mark.exhaustive
def test_lora(subject: Subject, tmp_path: Path) -> None:
    """Of every matrix that can be adapted: the tokens of the model with the adapter merged into its weights."""
    config = LoRAConfig(max_lora_rank=16, max_loras=1, max_cpu_loras=1)
    targets = Targets(describe(str(subject.path)).spec, config)
    modules = [name for name, _ in subject.model.named_modules() if targets.find(name) is not None]
    added = save_adapter(tmp_path, subject.model, 3, targets=modules, size=0.1)
    assert added.keys() == set(modules)
    plain, _ = subject.run()
    merged(subject.model, added)
    try:
        adapted, _ = subject.run(adapter=request(tmp_path), enable_lora=True)
    finally:
        merged(subject.model, added, -1)
    assert any(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(plain, adapted, strict=True))


def test_gguf(subject: Subject, tmp_path: Path) -> None:
    family = subject.family
    if not _has_gguf(family.architecture):
        pytest.skip("none of its files are read: the page says so")
    if family.name in GGUF_CASE_OF:
        subject = Subject(family, tmp_path / "hf", GGUF_CASE_OF[family.name])
    path = tmp_path / "model.gguf"
    write_gguf(subject.model, path)
    subject.run(path=path)


def _has_gguf(architecture: str) -> bool:
    return architecture in {*GGUF_ARCHITECTURES.values(), *GGUF_WITH_EXPERTS.values()}


def table() -> str:
    """The page: a row for each family. Run this file to write it."""
    wrappers = ", ".join(sorted({family.wrapper.architecture for family in FAMILIES if family.wrapper is not None}))
    lines = [
        "# Models and what each can do",
        "",
        "Every cell is a test of `tests/end_to_end/test_models_table.py`, on a tiny model with random weights against",
        "the transformers library: the same greedy tokens in float32, whole and in chunks, with cached prefixes,",
        "preempted and computed again, swapped out and in, with drafts by prompt lookup; log-probabilities near its",
        "own with int8 weights; those of the model with an adapter merged into its weights, served as LoRA (attention",
        "and dense MLPs); and the same tokens from a GGUF file as llama.cpp's converter writes it (– where the",
        "architecture has no name of its own there: a Mistral's file says llama). What has no row here runs through",
        "the library's own module, or is refused by name ([why](../engine/models/fallback/README.md)):",
        "`engine-serve --check MODEL` says whether it is served. Encoders",
        f"({', '.join(family.architecture for family in FAMILIES if not family.causal)}) generate nothing; theirs are",
        f"`test_encoders.py`, and `test_classifiers.py` of models that judge texts. Of {wrappers}",
        "the text model is served.",
        "",
        f"| architecture | {' | '.join(FEATURES)} |",
        f"|{'---|' * (1 + len(FEATURES))}",
    ]
    for architecture in sorted((family.architecture for family in DECODERS), key=str.lower):
        cells = ["yes"] * len(FEATURES)
        if not _has_gguf(architecture):
            cells[-1] = "–"
        lines.append(f"| {architecture} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def test_the_page_says_what_is_measured_here() -> None:
    assert TABLE.read_text() == table(), f"run {Path(__file__).name}"


if __name__ == "__main__":
    TABLE.write_text(table())
