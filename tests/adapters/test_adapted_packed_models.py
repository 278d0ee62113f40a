"""Adapters over packed weights, compiled: one tape, and each request's tokens are those that it has alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_merged_weights import PROMPT, open_llm, tokens
from tiny_adapters import BESIDE, request, save_adapter
from tiny_families import save_tiny

from engine import LLM

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["Llama", "Qwen3_5Moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The second has experts, and a gated MLP beside them."""
    path = tmp_path_factory.mktemp(request.param)
    module = save_tiny(request.param, path / "model", **BESIDE.get(request.param, {}))
    places = [path / f"adapter-{index}" for index in range(3)]
    for index, place in enumerate(places):
        save_adapter(place, module, index, rank=8 * (1 + index))
    return path / "model", places


def logprobs(llm: LLM, adapter: object) -> torch.Tensor:
    """Of the prompt's tokens."""
    from engine import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False, lora_request=adapter)  # type: ignore[arg-type]
    assert output.prompt_logprobs is not None
    return torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry])


@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.exhaustive), "int8"])
def test_packed_weights_are_near_the_exact_ones(model: tuple[Path, list[Path]], quantization: str) -> None:
    path, places = model
    adapters = [None, *(request(place, number) for number, place in enumerate(places, 1))]
    with open_llm(path) as llm:
        exact = [logprobs(llm, adapter) for adapter in adapters]
    options = {"dtype": "bfloat16", "compile": "pieces", "quantization": quantization, "enable_prefix_caching": False}
    with open_llm(path, **options) as llm:
        eager = tokens(llm, [PROMPT] * 4, adapters)
        llm.wait_compiled()
        found = [logprobs(llm, adapter) for adapter in adapters]
        together = tokens(llm, [PROMPT] * 4, adapters)
        alone = [tokens(llm, [PROMPT], adapter)[0] for adapter in adapters]
    assert together == alone
    assert len({tuple(each) for each in together}) == 4 and len(eager) == 4
    for index, each in enumerate(found):
        errors = [float((each - other).abs().mean()) for other in exact]
        assert errors[index] < 0.5 * min(errors[:index] + errors[index + 1 :]), errors
