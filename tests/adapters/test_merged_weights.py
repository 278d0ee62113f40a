"""Adapters, served by the whole engine: the tokens of the model with each merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import ALL, BESIDE, merged, request, save_adapter
from tiny_families import save_tiny

from engine import LLM, BeamSearchParams, EngineArgs, SamplingParams
from engine.adapters.config import LoRAConfig
from engine.adapters.linear import Adapted
from engine.adapters.tables import AdapterTables
from engine.adapters.targets import table_bytes
from engine.errors import ConfigError, InvalidRequestError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.plan import plan_of

PROMPT = [5 + (7 * i * i) % 90 for i in range(40)]
GENERATED = 12
LORA: list[dict[str, Any]] = [{}, {"enable_lora": True, "max_lora_rank": 16, "max_loras": 3}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)


def open_llm(model: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 200,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": 1 << 24,
        "compile": "none",
        "enable_lora": True,
        "max_lora_rank": 64,
    }
    return LLM(str(model), **{**settings, **options})


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """By transformers."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, do_sample=False, min_new_tokens=GENERATED, max_new_tokens=GENERATED)  # type: ignore[operator]
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def tokens(llm: LLM, prompts: list[list[int]], adapters: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False, lora_request=adapters
    )
    assert all(output.finished for output in outputs)
    for output in outputs:
        assert output.outputs[0].finish_reason == "length", output.outputs[0].stop_reason
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Glm"])
def test_tokens_are_those_of_merged_weights(family: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path / "model", pad_token_id=0)
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "gate_proj", "up_proj", "down_proj")
    added = save_adapter(tmp_path / "one", model, 1, targets=kinds, use_rslora=True, lora_alpha=4)
    plain = greedy(model, PROMPT)
    merged(model, added)
    expected = greedy(model, PROMPT)
    assert plain != expected
    with open_llm(tmp_path / "model") as llm:
        assert tokens(llm, [PROMPT, PROMPT], [None, request(tmp_path / "one")]) == [plain, expected]
        assert tokens(llm, [PROMPT, PROMPT], [request(tmp_path / "one"), None]) == [expected, plain], "by prefixes"


@pytest.mark.parametrize("family", ["Glm4Moe", "Qwen3_5Moe", "DeepseekV3"])
def test_mlps_beside_experts_are_changed(family: str, tmp_path: Path) -> None:
    """Those that all tokens pass; experts are parameters of another kind in transformers, and no module."""
    model = save_tiny(family, tmp_path / "model", **BESIDE.get(family, {}))
    added = save_adapter(tmp_path / "one", model, 1, targets=("gate_proj", "up_proj", "down_proj"), size=0.5)
    assert any("shared_expert" in name for name in added)
    plain = greedy(model, PROMPT)
    merged(model, added)
    expected = greedy(model, PROMPT)
    assert plain != expected
    with open_llm(tmp_path / "model") as llm:
        assert tokens(llm, [PROMPT, PROMPT], [None, request(tmp_path / "one")]) == [plain, expected]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[list[int]]]:
    """A model, adapters of ranks 8 to 64, and the tokens that each gives `PROMPT` by transformers; the first ones have
    none."""
    path = tmp_path_factory.mktemp("llama")
    model = save_tiny("Llama", path / "model")
    places, expected = [], [greedy(model, PROMPT)]
    for index in range(8):
        places.append(path / f"adapter-{index}")
        targets = ALL if index % 3 else ("q_proj", "v_proj", "up_proj")
        added = save_adapter(places[-1], model, index, rank=8 * (1 + index), targets=targets, size=0.1)
        merged(model, added)
        expected.append(greedy(model, PROMPT))
        merged(model, added, -1)
    assert len({tuple(each) for each in expected}) > 6, "adapters make a difference"
    return path / "model", places, expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"compile": "pieces"}, marks=pytest.mark.exhaustive, id="pieces"),
        {"max_loras": 3, "in_process": False},
    ],
)
def test_adapters_of_many_ranks_share_a_batch(
    llama: tuple[Path, list[Path], list[list[int]]], options: dict[str, Any]
) -> None:
    model, places, expected = llama
    adapters = [None, *(request(place, number) for number, place in enumerate(places, 1))]
    with open_llm(model, **{"enable_prefix_caching": False, **options}) as llm:
        llm.wait_compiled()
        assert tokens(llm, [PROMPT] * 9, adapters) == expected


def test_samples_beams_and_drafts_have_the_adapter(llama: tuple[Path, list[Path], list[list[int]]]) -> None:
    model, places, expected = llama
    adapter = request(places[3])
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with open_llm(model, speculative_config=drafts, max_num_seqs=4) as llm:
        params = SamplingParams(n=3, temperature=0.0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False, lora_request=adapter)
        assert [list(sample.token_ids) for sample in output.outputs] == [expected[4]] * 3
        assert output.lora_request == adapter
        beams = BeamSearchParams(beam_width=1, max_tokens=GENERATED, ignore_eos=True)
        [found] = llm.beam_search([{"prompt_token_ids": PROMPT}], beams, lora_request=adapter)
        assert found.sequences[0].tokens[len(PROMPT) :] == expected[4]


def test_prefixes_are_shared_among_equal_adapters_alone(llama: tuple[Path, list[Path], list[list[int]]]) -> None:
    model, places, _ = llama
    one, other = (request(place, number) for number, place in enumerate(places[:2], 1))
    with open_llm(model) as llm:
        found = []
        for adapter in (None, one, other, one, None, other):
            [output] = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False, lora_request=adapter)
            found.append(output.num_cached_tokens)
    assert found == [0, 0, 0, 32, 32, 32]


def test_what_cannot_be_loaded_fails_alone(llama: tuple[Path, list[Path], list[list[int]]], tmp_path: Path) -> None:
    model, places, expected = llama
    with open_llm(model) as llm:
        prompts = [{"prompt_token_ids": PROMPT}] * 2
        adapters = [request(tmp_path / "nowhere", 7), request(places[0], 1)]
        bad, good = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters)
        assert bad.outputs[0].finish_reason == "error" and "no adapter_config.json" in str(bad.outputs[0].stop_reason)
        assert list(good.outputs[0].token_ids) == expected[1]


def test_memory_for_slots_is_counted_before_it_is_taken(llama: tuple[Path, list[Path], list[list[int]]]) -> None:
    spec = describe(str(llama[0])).spec
    assert spec is not None
    config, model = LoRAConfig(max_lora_rank=16, max_loras=3, max_cpu_loras=3), Decoder(spec, dtype=torch.float32)
    AdapterTables(model, spec, config, 8)
    found = sum(layer.a.nbytes + layer.b.nbytes for layer in model.modules() if isinstance(layer, Adapted))
    assert 2 * found == table_bytes(spec, config, 4) > 0, "as many are kept as there are slots"
    plans = [plan_of(EngineArgs(model=str(llama[0]), device="cpu", dtype="float32", **lora)) for lora in LORA]
    assert plans[1].weight_bytes - plans[0].weight_bytes == table_bytes(spec, config, 4)


def test_settings_that_mean_nothing_are_refused(llama: tuple[Path, list[Path], list[list[int]]]) -> None:
    model, places, _ = llama
    for options, said in (
        ({"enable_lora": False}, "max_lora_rank is of adapters"),
        ({"max_lora_rank": 1000}, "max_lora_rank must be in"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_llm(model, **options)
    with (
        open_llm(model, enable_lora=False, max_lora_rank=None) as llm,
        pytest.raises(InvalidRequestError, match="--enable-lora"),
    ):
        llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False, lora_request=request(places[0]))
