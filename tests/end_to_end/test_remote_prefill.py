"""Two engines with a model: one computes prompts, the other one decodes. The pages are the same bytes on both sides,
and the tokens are those of one engine."""

from __future__ import annotations

import random
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_families import save_tiny

from engine import LLM, RequestOutput, SamplingParams
from engine.core.in_process_client import InProcessClient
from engine.core.loop import CoreLoop
from engine.errors import ConfigError, InvalidRequestError
from engine.kv_cache.kv_cache import KVCache
from engine.kv_transfer import reader
from engine.kv_transfer.memory import Pages

SETTINGS: dict[str, Any] = {"block_size": 16, "compile": "none", "max_model_len": 512, "kv_cache_memory": "16MiB"}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)


def engine(path: Path, role: str, port: int = 0, nixl: bool = False, **more: Any) -> LLM:
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": port}
    if nixl:
        config["kv_connector_extra_config"] = {"backends": ["UCX"]}
    return LLM(str(path), kv_transfer_config=config, swap_space="16MiB", **{**SETTINGS, **more})


def with_transfer(params: SamplingParams, transfer: dict[str, Any] | None, **more: Any) -> SamplingParams:
    copy = params.clone()
    copy.extra_args = {"kv_transfer_params": transfer}
    for name, value in more.items():
        setattr(copy, name, value)
    return copy


def generate(llm: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]


def core_of(llm: LLM) -> CoreLoop:
    client = llm._session.client
    assert isinstance(client, InProcessClient) and client._core is not None
    return client._core


def checksums(llm: LLM) -> dict[bytes, bytes]:
    """Of each page that is found on the device, by its name."""
    core = core_of(llm)
    kv: KVCache = core._scheduler._kv  # type: ignore[attr-defined]
    assert core._executor is not None
    pages: Pages = core._executor.kv_memory().device  # type: ignore[attr-defined]
    sums = {}
    for key, block in kv.pool._block_of.items():
        into = np.empty(pages.page_bytes, dtype=np.uint8)
        pages.pack([block], into)
        sums[key] = blake2b(into.tobytes()).digest()
    return sums


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("transport", ["shared memory", "TCP", "NIXL"])
def test_pages_and_tokens_are_those_of_one_engine(
    family: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "TCP":
        monkeypatch.setattr(reader, "local_name", lambda port: f"\0nobody-{port}")
    if transport == "NIXL":
        pytest.importorskip("nixl", reason="needs the extra nixl")
    save_tiny(family, tmp_path)
    rolls = random.Random(3)
    prompts = [[rolls.randrange(3, 90) for _ in range(length)] for length in (5, 17, 64, 65, 333)]
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    alone, source = LLM(str(tmp_path), **SETTINGS), engine(tmp_path, "kv_both", nixl=transport == "NIXL")
    target = engine(tmp_path, "kv_both", nixl=transport == "NIXL", kv_events_config=events)
    assert source.ready.kv_layout == target.ready.kv_layout and source.ready.kv_layout["block_size"] == "16"
    for prompt in prompts:
        first = generate(source, prompt, with_transfer(GREEDY, ASKED, max_tokens=1))
        params = first.kv_transfer_params
        assert (params is not None) == (len(prompt) > 16)
        for sampling in (GREEDY, DRAWN):
            wanted = generate(alone, prompt, sampling).outputs[0].token_ids
            got = generate(target, prompt, with_transfer(sampling, params))
            assert got.outputs[0].token_ids == wanted
            assert got.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    stats = target.stats()
    assert (stats.kv_fetches, stats.kv_fetch_failures) == (4, 0), "what is here already is not fetched again"
    there, here = checksums(source), checksums(target)
    common = there.keys() & here.keys()
    assert len(common) >= sum((len(prompt) - 1) // 16 for prompt in prompts)
    assert all(there[key] == here[key] for key in common)
    generate(source, [3] * 5, GREEDY)  # the source's core hears that its leases are over
    assert core_of(source)._scheduler.stats().kv_blocks_used == 0
    for llm in (alone, source, target):
        llm.shutdown()


def test_other_weights_or_blocks_are_told_apart_and_the_prompt_is_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seed in (("one", {}), ("other", {"initializer_range": 0.03})):
        (tmp_path / name).mkdir()
        save_tiny("Llama", tmp_path / name, **seed)
    source = engine(tmp_path / "one", "kv_producer")
    prompt = [random.Random(1).randrange(3, 90) for _ in range(100)]
    for path, block_size, differs in (
        ("other", 16, "differ: weights [0-9a-f]{16} and [0-9a-f]{16}$"),
        ("one", 32, "differ: block_size 16 and 32$"),
    ):
        params = generate(source, prompt, with_transfer(GREEDY, ASKED, max_tokens=1)).kv_transfer_params
        target = engine(tmp_path / path, "kv_consumer", block_size=block_size)
        got = generate(target, prompt, with_transfer(GREEDY, params))
        stats = target.stats()
        assert (got.num_cached_tokens, stats.kv_fetches, stats.kv_fetch_failures) == (0, 0, 1)
        assert re.search(differs, caplog.messages[-1])
        target.shutdown()
        alone = LLM(str(tmp_path / path), **{**SETTINGS, "block_size": block_size})
        assert got.outputs[0].token_ids == generate(alone, prompt, GREEDY).outputs[0].token_ids
        alone.shutdown()
    source.shutdown()


def test_what_this_engine_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny("Llama", tmp_path)
    plain, source = LLM(str(tmp_path), **SETTINGS), engine(tmp_path, "kv_producer")
    remote = {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_request_id": "1.x",
        "remote_host": "h",
        "remote_port": 1,
    }
    for llm, asked, reason in (
        (plain, ASKED, "computes prompts for no other"),
        (plain, remote, "takes prompts from none"),
        (source, remote, "takes prompts from none"),
        (source, {**ASKED, "do_remote_prefill": True}, "exclude each other"),
        (source, {"do_remote_decode": "yes"}, "bool"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            generate(llm, [5] * 40, with_transfer(GREEDY, asked))
    assert generate(plain, [5] * 40, with_transfer(GREEDY, None)).kv_transfer_params is None
    plain.shutdown()
    source.shutdown()
    for more, reason in (
        ({"kv_role": "kv_any"}, "kv_role"),
        ({"kv_port": 70000}, "kv_port"),
        ({"kv_connector": "MooncakeConnector"}, "kv_connector"),
        ({"kv_rank": 0}, "kv_rank"),
    ):
        with pytest.raises(ConfigError, match=reason):
            config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", **more}
            LLM(str(tmp_path), kv_transfer_config=config, **SETTINGS)
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    for setting in ({"pipeline_parallel_size": 2}, {"enable_prefix_caching": False}):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            LLM(str(tmp_path), kv_transfer_config=config, **{**SETTINGS, **setting})
    with pytest.raises(ConfigError, match="kv_port must be at most 65534"):
        LLM(str(tmp_path), kv_transfer_config={**config, "kv_port": 65535}, data_parallel_size=2, **SETTINGS)
