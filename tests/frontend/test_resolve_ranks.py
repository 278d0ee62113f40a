"""What ranks and replicas come to; what cannot be computed together is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_resolve import H100, PER_TOKEN, _resolve, machine

from engine.core.rounds import in_rounds
from engine.errors import ConfigError, UnsupportedModelError
from engine.executor.inline import computes_inline
from engine.machine import CudaDevice
from engine.models.description import ModelDescription, describe
from engine.models.placement import ExpertPlacement
from engine.models.spec import ExpertsSpec, RouterSpec
from engine.parallel_config import EplbConfig
from engine.parallel_settings import check_model


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelDescription:
    return describe(str(tiny_model))


def test_ranks_that_have_no_part_are_refused_before_anything_is_loaded(model: ModelDescription) -> None:
    assert _resolve(model, tensor_parallel_size=2).parallel.tensor == 2
    for ranks, says in ((0, "at least 1"), (65, "at most 64"), (5, "exceeds the 4 heads")):
        with pytest.raises(ConfigError, match=says):
            _resolve(model, tensor_parallel_size=ranks)
    of_library = msgspec.structs.replace(model, spec=None)
    with pytest.raises(UnsupportedModelError, match=r"enable_expert_parallel: .* runs through the library"):
        _resolve(of_library, tensor_parallel_size=2, enable_expert_parallel=True)
    on_gpus = _resolve(model, H100, H100, tensor_parallel_size=2)
    assert on_gpus.device.kind == "cuda"
    with pytest.raises(UnsupportedModelError, match="only CPUs compute parts"):
        check_model(on_gpus, of_library)
    with pytest.raises(ConfigError, match=r"needs a GPU, which makes 4, and there are 3"):
        _resolve(model, H100, H100, H100, tensor_parallel_size=2, data_parallel_size=2)
    with pytest.raises(ConfigError, match="stages compute on CPUs only"):
        _resolve(model, H100, H100, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="cores binds the threads of one rank"):
        _resolve(model, cores=(0, 1), tensor_parallel_size=2)


def test_ranks_are_started_by_whom_vllm_names(model: ModelDescription) -> None:
    for backend in ("mp", "uni"):
        assert _resolve(model, distributed_executor_backend=backend).parallel.backend == "mp"
    two: dict[str, Any] = {"tensor_parallel_size": 2}
    ray = _resolve(
        model,
        distributed_executor_backend="ray",
        ray_placement_strategy="STRICT_SPREAD",
        distributed_timeout_seconds=7.5,
        **two,
    ).parallel
    assert (ray.backend, ray.ray_placement, ray.timeout_s) == ("ray", "STRICT_SPREAD", 7.5)
    external = _resolve(model, distributed_executor_backend="external_launcher", **two).parallel
    assert (external.backend, external.timeout_s) == ("external_launcher", 300)
    stages = _resolve(model, distributed_executor_backend="ray", pipeline_parallel_size=2).parallel
    assert (stages.backend, stages.ranks) == ("ray", 2)
    for settings, says in (
        ({"distributed_executor_backend": "uni", **two}, "is of one rank, and there are 2"),
        ({"distributed_executor_backend": "ray"}, "places ranks, and there is one"),
        ({"distributed_executor_backend": "ray", "data_parallel_size": 2, **two}, "the ranks of one replica"),
        ({"distributed_executor_backend": "ray", "distributed_timeout_seconds": 0, **two}, r"must be in \(0, 86400\]"),
        ({"ray_placement_strategy": "SPREAD", **two}, "is of distributed_executor_backend='ray'"),
        ({"distributed_timeout_seconds": 5, **two}, "is how long ranks of distributed_executor_backend='ray'"),
        ({"distributed_executor_backend": "slurm"}, "must be one of mp, ray, external_launcher, uni"),
    ):
        with pytest.raises(ConfigError, match=says):
            _resolve(model, **settings)
    with pytest.raises(ConfigError, match="NCCL between hosts is unproven here"):
        _resolve(model, H100, H100, distributed_executor_backend="ray", **two)


def test_experts_are_dealt_out_to_ranks_where_there_are_both(model: ModelDescription) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size are 1: raise one of them, or drop this"):
        _resolve(model, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="enable_expert_parallel: the model has no experts"):
        _resolve(model, enable_expert_parallel=True, tensor_parallel_size=2)
    assert model.spec is not None
    experts = ExpertsSpec(count=5, inner_size=24, router=RouterSpec(top_k=2))
    layers = tuple(msgspec.structs.replace(layer, mlp=None, experts=experts) for layer in model.spec.layers)
    mixture = msgspec.structs.replace(model, spec=msgspec.structs.replace(model.spec, layers=layers))
    assert _resolve(mixture, tensor_parallel_size=2, enable_expert_parallel=True).parallel.experts == ExpertPlacement()
    assert _resolve(mixture, tensor_parallel_size=1).parallel.experts is None
    with pytest.raises(ConfigError, match="24 units is divided in multiples of 16"):
        _resolve(mixture, tensor_parallel_size=2)
    over_replicas = {"data_parallel_size": 2, "enable_expert_parallel": True}
    assert in_rounds(_resolve(mixture, **over_replicas))
    assert not in_rounds(_resolve(mixture, data_parallel_size=2))
    for settings, gpus, says in (
        ({"data_parallel_size": 6}, (), "5 experts are too few for 6 ranks"),
        ({"tensor_parallel_size": 2}, (), "one rank each, and tensor_parallel_size is 2"),
        ({"pipeline_parallel_size": 2}, (), "one rank each, and pipeline_parallel_size is 2"),
        ({"device": "cuda"}, (H100, H100), "on CPUs only"),
    ):
        with pytest.raises(ConfigError, match=says):
            _resolve(mixture, *gpus, **{**over_replicas, **settings})
    with pytest.raises(UnsupportedModelError, match="experts of the library's modules are not divided"):
        _resolve(msgspec.structs.replace(mixture, spec=None), **over_replicas)

    moves = {**over_replicas, "enable_eplb": True}
    moving = _resolve(mixture, **over_replicas, enable_eplb=True, eplb_config={"window_size": 5, "step_interval": 5})
    assert moving.parallel.eplb == EplbConfig(window_size=5, step_interval=5)
    for settings, says in (
        ({**over_replicas, "eplb_config": {"window_size": 5}}, "which they do with enable_eplb"),
        ({"enable_eplb": True}, "experts move between the replicas of data_parallel_size"),
        ({"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2}, "and nowhere else"),
        ({**moves, "eplb_config": {"window_size": 3001}}, r"window_size \(3001\) must be in \[1, step_interval\]"),
        ({**moves, "eplb_config": {"window_size": 0}}, r"Expected `int` >= 1 - at `\$.window_size`; it may"),
        ({**moves, "eplb_config": {"step_interval": 1000001}}, r"Expected `int` <= 1000000 - at `\$.step_interval`"),
        ({**moves, "eplb_config": {"num_redundant_experts": 2}}, r"num_redundant_experts \(2\): each expert is in one"),
        (
            {**moves, "eplb_config": {"use_async": True}},
            "unknown field `use_async`; it may have window_size, step_interval, log",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            _resolve(mixture, **settings)


def test_a_replica_needs_room_for_its_own_experts_only(model: ModelDescription) -> None:
    assert model.spec is not None
    memory = machine().memory_bytes
    experts = ExpertsSpec(count=8, inner_size=memory // (3 * 64 * 8 * 2 * 3), router=RouterSpec(top_k=2))
    layer = msgspec.structs.replace(model.spec.layers[0], mlp=None, experts=experts)
    spec = msgspec.structs.replace(model.spec, layers=(layer,))
    large = msgspec.structs.replace(model, spec=spec, facts=spec.facts)
    with pytest.raises(ConfigError, match="the weights alone take at least"):
        _resolve(large, data_parallel_size=4)
    assert in_rounds(_resolve(large, data_parallel_size=4, enable_expert_parallel=True))


def test_stages_are_refused_before_anything_is_loaded_where_there_is_something_that_they_cannot_do(
    model: ModelDescription,
) -> None:
    config = _resolve(model, pipeline_parallel_size=2)
    assert (config.parallel.pipeline, config.parallel.ranks) == (2, 2)
    assert (config.scheduler.stages, config.scheduler.steps_in_flight) == (2, 2)
    assert computes_inline(config)
    for stages, says in ((0, "at least 1"), (65, "at most 64"), (64, "exceeds the")):
        with pytest.raises(ConfigError, match=says):
            _resolve(model, pipeline_parallel_size=stages)
    with pytest.raises(UnsupportedModelError, match="runs through the library"):
        _resolve(msgspec.structs.replace(model, spec=None), pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="compute on CPUs only"):
        _resolve(model, H100, H100, pipeline_parallel_size=2)
    for setting, says in (
        ({"cores": (0, 1)}, "cores binds the threads of one rank"),
        ({"tensor_parallel_size": 33}, "times pipeline_parallel_size must be at most 64, got 66"),
        ({"async_scheduling": True}, "stages have steps in flight without it"),
        ({"speculative_config": {"method": "suffix"}}, "method 'suffix' is not of models in stages"),
    ):
        with pytest.raises(ConfigError, match=says):
            _resolve(model, pipeline_parallel_size=2, **setting)
    assert _resolve(model, pipeline_parallel_size=2, speculative_config={"method": "ngram"}).scheduler.stages == 2
    assert _resolve(model, pipeline_parallel_size=2, tensor_parallel_size=2).parallel.ranks == 4


def test_a_memory_for_keys_and_values_holds_those_that_all_stages_keep(model: ModelDescription) -> None:
    lengths = {
        stages: _resolve(model, kv_cache_memory=PER_TOKEN * 64, pipeline_parallel_size=stages).model.max_model_len
        for stages in (1, 2)
    }
    assert lengths == {1: 64, 2: 64}


def test_a_memory_for_keys_and_values_holds_those_that_several_ranks_have(model: ModelDescription) -> None:
    """Two KV heads, of which four ranks have one each."""
    lengths = {
        ranks: _resolve(model, kv_cache_memory=PER_TOKEN * 64, tensor_parallel_size=ranks).model.max_model_len
        for ranks in (1, 2, 4)
    }
    assert lengths == {1: 64, 2: 64, 4: 32}


def test_replicas_share_a_cpus_cores_and_memory_and_each_have_a_gpu(model: ModelDescription) -> None:
    found = _resolve(model, data_parallel_size=2)
    assert (found.parallel.data, found.device.threads) == (2, max(_resolve(model).device.threads // 2, 1))
    assert _resolve(model, H100, H100, data_parallel_size=2, device="cuda").parallel.data == 2
    cases: tuple[tuple[dict[str, object], tuple[CudaDevice, ...], str], ...] = (
        ({"data_parallel_size": 65}, (), "data_parallel_size must be at most 64, got 65"),
        ({"data_parallel_size": 0}, (), "data_parallel_size must be at least 1, got 0"),
        ({"max_num_seqs": 10**9}, (), "max_num_seqs must be at most 65536, got 1000000000"),
        ({"max_num_batched_tokens": 10**9}, (), "max_num_batched_tokens must be at most 4194304, got 1000000000"),
        ({"data_parallel_size": 2, "cores": (0, 1)}, (), "cores binds the threads of one replica"),
        ({"data_parallel_size": 2, "device": "cuda"}, (H100,), "needs a GPU, which makes 2, and there are 1"),
    )
    for settings, gpus, problem in cases:
        with pytest.raises(ConfigError, match=problem):
            _resolve(model, *gpus, **settings)
    memory = machine().memory_bytes
    assert _resolve(model, swap_space=memory // 2 + 1).cache.swap_space == memory // 2 + 1
    with pytest.raises(ConfigError, match="exceeds a replica's share of the machine's memory"):
        _resolve(model, data_parallel_size=2, swap_space=memory // 2 + 1)
    with pytest.raises(ConfigError, match="exceeds a replica's share of this machine's memory"):
        _resolve(model, data_parallel_size=2, kv_cache_memory=memory // 2 + 1)


def test_ranks_that_divide_positions_keep_each_token_once(model: ModelDescription) -> None:
    two: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    found = _resolve(model, block_size=8, **two)
    assert (found.parallel.context, found.cache.block_size, found.parallel.kv_copies) == (2, 16, 1)
    assert _resolve(model, tensor_parallel_size=2).parallel.kv_copies == 2
    for settings, machines, says in (
        ({"decode_context_parallel_size": 0}, (), "must be at least 1"),
        ({"decode_context_parallel_size": 2}, (), r"all ranks of tensor_parallel_size \(1\)"),
        ({**two, "tensor_parallel_size": 4}, (), r"all ranks of tensor_parallel_size \(4\)"),
        (two, (H100, H100), "on CPUs only"),
        ({**two, "pipeline_parallel_size": 2}, (), "stages keep their own layers whole"),
        ({**two, "speculative_config": {"method": "eagle3", "model": "m"}}, (), "keys and values of its own"),
    ):
        with pytest.raises(ConfigError, match=says):
            _resolve(model, *machines, **settings)
    with pytest.raises(UnsupportedModelError, match="an encoder keeps no keys"):
        _resolve(msgspec.structs.replace(model, facts=msgspec.structs.replace(model.facts, keeps_kv=False)), **two)
