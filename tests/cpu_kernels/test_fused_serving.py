"""Engines with and without the tape answer with the same tokens and the same bits of log probabilities."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gguf import GGMLQuantizationType

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("models", "end_to_end")]
from gguf_models import write_gguf
from tiny_families import save_tokenizer
from tiny_models import CASES, SHAPE, make_model, save
from transformers import AutoModelForCausalLM, LlamaConfig

from attention_backends.toolchain import find_compiler
from compilation.interface import FuseSteps
from compilation.split import Fused, Step
from compilation.trace import Traced
from engine import LLM, SamplingParams
from engine.cpu_kernels.tape import fuse_native_steps
from engine.models.packed import JoinedLinear
from engine.request import RequestOutput
from engine.runner import model_runner
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_attention import PagedAttention
from engine.weights.gguf_source import GgufSource

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

LAYERS = SHAPE["num_hidden_layers"]
FAMILIES = ["llama_tied", "llama_biases", "qwen2", "qwen3", "mistral_window"]
FAMILIES += ["phi3_long_rope", "granite", "glm4", "hunyuan", "exaone4", "smollm3_windows", "ernie4_5"]
FAMILIES += ["olmo2_as_many_heads", "helium", "qwen3_moe", "glm4_moe"]
"""untied where the name does not say otherwise"""
LENGTHS = (5, 40, 100, 1, 33, 17)
PROMPTS = [[3 + (i * 37 + j * j + j) % 190 for j in range(n)] for i, n in enumerate(LENGTHS)]
BUDGET = 48
"""tokens of a step: prompts are read in chunks, beside others that decode"""
Answers = list[tuple[list[int], list[dict[int, float]], list[dict[int, float]]]]
"""tokens; log probabilities of the likeliest; the same of the prompt"""


@dataclass
class Counts:
    """Of the steps since the model was compiled."""

    parts: int = 0
    """fused ones in the program"""
    runs: int = 0
    """calls of those"""
    attended: int = 0
    """calls of attention from Python"""


@dataclass
class Served:
    answers: list[Answers] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def logprobs_of(entries: Sequence[Any] | None) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in (at or {}).items()} for at in entries or []]


def answers_of(outputs: Sequence[RequestOutput]) -> Answers:
    return [
        (list(o.outputs[0].token_ids), logprobs_of(o.outputs[0].logprobs), logprobs_of(o.prompt_logprobs))
        for o in outputs
    ]


def watch(patch: pytest.MonkeyPatch, counts: Counts) -> None:
    make, attend = fuse_native_steps, PagedAttention.attend

    def watched_steps(layer_of: Any, steps_of: Any) -> FuseSteps:
        fuse = make(layer_of, steps_of)

        def watched(step: Step) -> Step:
            if not isinstance(step, Fused):
                return step
            counts.parts += 1

            def function(arguments: list[Any], call: Callable[..., Any] = step.function) -> Sequence[Any]:
                counts.runs += 1
                outputs: Sequence[Any] = call(arguments)
                return outputs

            return replace(step, function=function)

        def watched_fuse(traced: Traced, steps: Sequence[Step]) -> Sequence[Step]:
            return [watched(step) for step in fuse(traced, steps)]

        return watched_fuse

    def counted(self: PagedAttention, *arguments: Any) -> None:
        counts.attended += 1
        attend(self, *arguments)

    patch.setattr(model_runner, "fuse_native_steps", watched_steps)
    patch.setattr(PagedAttention, "attend", counted)


def serve(path: Path | str, *, fuse: bool = True, **settings: Any) -> Served:
    """Prompts together, and one alone; compiled first."""
    served = Served()
    given: dict[str, Any] = {
        "max_model_len": 192,
        "kv_cache_memory": 1 << 22,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 4,
    }
    given |= {"device": "cpu", "dtype": "bfloat16", "threads": 2}
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, served.counts)
        if not fuse:
            patch.setattr(ModelRunner, "_fuse_steps", lambda self: None)
        with LLM(str(path), **(given | settings)) as llm:
            llm.wait_compiled()
            llm.generate({"prompt_token_ids": [7]}, SamplingParams(max_tokens=2), use_tqdm=False)  # steps are swapped
            served.counts.attended = served.counts.runs = 0
            for prompts in (PROMPTS, PROMPTS[1:2], [PROMPTS[3]]):
                asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
                served.answers.append(answers_of(llm.generate(asked, params, use_tqdm=False)))
    return served


def assert_same(path: Path | str, *, layers: int = LAYERS, **settings: Any) -> list[Answers]:
    fused, plain = serve(path, **settings), serve(path, fuse=False, **settings)
    assert [len(tokens) for tokens, _, _ in fused.answers[0]] == [8] * len(PROMPTS)
    assert all(len(at) >= 5 for _, logprobs, _ in fused.answers[0] for at in logprobs)
    assert fused.answers == plain.answers
    assert fused.counts.parts == 1 and fused.counts.attended == 0, "attention belongs to the tape"
    assert plain.counts.parts == plain.counts.runs == 0
    assert plain.counts.attended == layers * fused.counts.runs > 0
    return fused.answers


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            save(make_model(case), made[case])
            save_tokenizer(made[case])
        return made[case]

    return path


QUANTIZATIONS: tuple[Literal["none", "int8", "int4"], ...] = ("none", "int8", "int4")
CACHES: tuple[Literal["bf16", "int8"], ...] = ("bf16", "int8")
IN_EVERY_FORMAT = ("glm4_moe",)
"""with experts"""
OF_THEIR_OWN = ("qwen3", "smollm3_windows", "olmo2_as_many_heads")
"""whose tapes differ from those; of each the default run takes the next format and cache"""


def served() -> list[Any]:
    rows = []
    for index, case in enumerate(FAMILIES):
        for place, quantization in enumerate(QUANTIZATIONS):
            for cache in CACHES:
                its_cache = CACHES[(index + place) % 2]
                alone = case in OF_THEIR_OWN and place == index % 3
                chosen = cache == its_cache and (case in IN_EVERY_FORMAT or alone)
                rows.append(pytest.param(case, quantization, cache, marks=() if chosen else pytest.mark.exhaustive))
    return rows


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "quantization", "kv_cache_dtype"), served())
def test_the_tape_changes_no_bit_of_an_answer(
    path_of: Callable[[str], Path],
    case: str,
    quantization: Literal["none", "int8", "int4"],
    kv_cache_dtype: Literal["bf16", "int8"],
) -> None:
    assert case in CASES
    assert_same(path_of(case), quantization=quantization, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.exhaustive), "int8"])
def test_layers_that_are_worth_several_threads(tmp_path: Path, quantization: Literal["none", "int8"]) -> None:
    config = LlamaConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 2048, "initializer_range": 0.06})
    save(AutoModelForCausalLM.from_config(config), tmp_path)
    save_tokenizer(tmp_path)
    answers = [assert_same(tmp_path, threads=threads, quantization=quantization) for threads in (1, 2, 3)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.timeout(300)
def test_one_layer(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "num_hidden_layers": 1}))
    save(model, tmp_path)
    save_tokenizer(tmp_path)
    fused, plain = serve(tmp_path), serve(tmp_path, fuse=False)
    assert fused.answers == plain.answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"intermediate_size": 40}, marks=pytest.mark.exhaustive),
        {"hidden_size": 63, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    ],
    ids=["gates_that_fill_no_panels", "hidden_63"],
)
def test_a_model_with_layers_that_are_not_packed_serves_unfused(tmp_path: Path, changes: dict[str, int]) -> None:
    save(AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, **changes})), tmp_path)
    save_tokenizer(tmp_path)
    fused, plain = serve(tmp_path), serve(tmp_path, fuse=False)
    assert fused.counts.parts == 0 and fused.counts.attended == plain.counts.attended > 0
    assert fused.answers == plain.answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("of", ["every", "some"])
def test_a_gguf_file_of_mixed_formats_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """A layer that is joined of several formats writes its parts side by side, in the tape of all layers."""
    layers = 5
    shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers, "vocab_size": 259}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    path = write_gguf(model, tmp_path / "model.gguf", GGMLQuantizationType.Q4_0)
    save_tokenizer(tmp_path / "tokenizer")
    encoded = GgufSource.encoded

    def mixed(self: GgufSource, name: str, expert: int | None = None) -> tuple[int, torch.Tensor] | None:
        """As if some values had been stored in 16 bits."""
        chosen = range(layers) if of == "every" else (1, 4)
        return None if any(f"layers.{i}.self_attn.v_proj" in name for i in chosen) else encoded(self, name, expert)

    monkeypatch.setattr(GgufSource, "encoded", mixed)
    joins: list[int] = []
    monkeypatch.setattr(JoinedLinear, "__init__", counting(joins, JoinedLinear.__init__))
    tokenizer = str(tmp_path / "tokenizer")
    fused, plain = serve(path, tokenizer=tokenizer), serve(path, fuse=False, tokenizer=tokenizer)
    assert len(joins) == 2 * (layers if of == "every" else 2)
    assert fused.answers == plain.answers
    assert fused.counts.parts == 1 and fused.counts.runs > 0
    assert fused.counts.attended == 0 < plain.counts.attended


@pytest.mark.timeout(300)
def test_steps_between_tapes_serve(path_of: Callable[[str], Path]) -> None:
    """Llama 4's queries grow, and its experts are given rows times a factor, by torch's own operations."""
    fused, plain = serve(path_of("llama4")), serve(path_of("llama4"), fuse=False)
    assert fused.answers == plain.answers
    assert fused.counts.parts == 2 and 0 < fused.counts.attended < plain.counts.attended


def counting(calls: list[int], function: Callable[..., None]) -> Callable[..., None]:
    def counted(*arguments: Any) -> None:
        calls.append(1)
        function(*arguments)

    return counted


@pytest.mark.timeout(300)
def test_a_float32_model_has_no_tape(path_of: Callable[[str], Path]) -> None:
    served = serve(path_of("llama_tied"), dtype="float32")
    assert served.counts.parts == 0 and served.counts.attended > 0
