"""Models that run through the library's own module, in parts, one for each rank: what the whole computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import DenseAttention
from test_tensor_parallel import args_of, greedy
from test_transformers_fallback import PROMPT, SERVED, library_model, served
from thread_group import ThreadGroup, in_ranks
from tiny_families import save_tiny
from transformers import AutoModelForCausalLM

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.description import describe
from engine.models.facts import ModelFacts
from engine.models.fallback.division import check_library_divided, divided_facts
from engine.models.fallback.model import FallbackModel
from engine.models.sharding import Shard
from engine.weights.fallback_loader import load_fallback
from engine.weights.loader import weight_bytes

SAMPLE = {"dots1", "exaone4", "nanochat"}
"""divided in every run: a shared expert beside experts that are whole, norms of heads, an MLP without a gate"""
POSITIONS: dict[str, Any] = {"decode_context_parallel_size": 2}


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads a checkpoint with what is the process's: ranks that are threads take turns."""
    lock, read = threading.Lock(), AutoModelForCausalLM.from_pretrained

    def locked(*given: Any, **settings: Any) -> Any:
        with lock:
            return read(*given, **settings)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", locked)


def logits_of(model: FallbackModel, facts: ModelFacts) -> torch.Tensor:
    model.set_attention(DenseAttention(facts, model.sinks))
    at, parts = 0, []
    for size in (1, 17, 3, len(PROMPT) - 21):
        parts.append(model.compute_logits(model(torch.tensor(PROMPT[at : at + size]), torch.arange(at, at + size))))
        at += size
    return torch.cat(parts)


def part_of(path: str) -> Callable[[ThreadGroup], tuple[torch.Tensor, int]]:
    def work(group: ThreadGroup) -> tuple[torch.Tensor, int]:
        model = load_fallback(
            describe(path, "transformers"),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_position=256,
            dummy=False,
            seed=0,
            group=group,
        )
        return logits_of(model, divided_facts(path, Shard(group.rank, group.size))), weight_bytes(model)

    return work


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if name in SAMPLE and size == 2 else pytest.mark.exhaustive)
        for name in SERVED
        for size in (2, 3)
    ],
)
def test_parts_of_a_librarys_model_give_the_logits_of_the_whole_or_are_refused(
    name: str, size: int, tmp_path: Path
) -> None:
    library_model(name, tmp_path)
    path = str(tmp_path)
    try:
        check_library_divided(path, size)
        (logits, held), *others = in_ranks(size, part_of(path))
    except UnsupportedModelError as error:
        assert name not in SAMPLE and "tensor_parallel_size: " in str(error)
        return
    whole = served(tmp_path)
    with torch.inference_mode():
        expected = logits_of(whole, describe(path, "transformers").facts)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert held < weight_bytes(whole)
    assert all(torch.equal(of_other, logits) for of_other, _ in others)


@pytest.mark.exhaustive
def test_at_least_30_architectures_of_the_library_are_divided(tmp_path: Path) -> None:
    divided = []
    for name in SERVED:
        library_model(name, tmp_path / name)
        try:
            check_library_divided(str(tmp_path / name), 2)
        except UnsupportedModelError:
            continue
        divided.append(name)
    assert len(divided) >= 30


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("gpt2", 2, "the library does not say how its heads are divided"),
        ("olmo2", 2, "the library does not say how its heads are divided"),  # norms of whole rows of q and k
        ("gpt_neox", 2, "query_key_value is not a matrix of its heads alone"),
        ("beam", 2, "what it has beside its matrices is not divided"),
        ("exaone4", 5, "it has 4 heads"),
    ],
)
def test_what_would_be_divided_wrongly_is_refused_by_name(name: str, size: int, message: str, tmp_path: Path) -> None:
    library_model(name, tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        check_library_divided(str(tmp_path), size)


@pytest.mark.usefixtures("one_at_a_time")
def test_an_mlp_whose_units_see_each_other_is_refused(tmp_path: Path) -> None:
    """Gemma 3n's keeps those that stand out of the others: neither names nor shapes tell."""
    library_model("gemma3n_text", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"mlp cannot be divided: what its units do depends on others"):
        in_ranks(2, part_of(str(tmp_path)))


def test_an_mlp_with_fewer_units_than_ranks_is_refused(tmp_path: Path) -> None:
    library_model("exaone4", tmp_path, intermediate_size=16)
    with pytest.raises(ConfigError, match="an MLP of 16 units"):
        check_library_divided(str(tmp_path), 2)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize(
    ("dtype", "quantization", "family", "settings"),
    [
        ("bfloat16", "int8", "Llama", {}),
        pytest.param("float32", "auto", "Gemma3", {}, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "auto", "Qwen3Moe", {}, marks=pytest.mark.exhaustive),
        pytest.param("float32", "auto", "Gemma3", POSITIONS, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "int8", "Llama", POSITIONS, marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_of_a_librarys_model_have_the_bits_of_all_parts_in_one_process(
    dtype: str, quantization: str, family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(family, tmp_path)
    args = args_of(tmp_path, dtype=dtype, quantization=quantization, model_impl="transformers", **settings)
    assert greedy(args, 16) == greedy(args, 16, threads=True)


@pytest.mark.exhaustive
def test_compiled_ranks_of_a_librarys_model_give_the_tokens_of_the_whole(tmp_path: Path) -> None:
    save_tiny("Llama", tmp_path)
    found = greedy(args_of(tmp_path, compile="pieces", model_impl="transformers"), 16)
    expected = greedy(args_of(tmp_path, ranks=1, model_impl="transformers"), 16)
    for (tokens, logprobs), (of_whole, logprobs_of_whole) in zip(found, expected, strict=True):
        assert tokens == of_whole
        for step, of_step in zip(logprobs, logprobs_of_whole, strict=True):
            assert step == pytest.approx(of_step, abs=1e-4)
