"""What settings of ranks and replicas come to, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from test_resolve import H100, PER_TOKEN, _resolve, machine, model

from engine.errors import ConfigError, UnsupportedModelError
from engine.machine import CudaDevice
from engine.models.description import ModelDescription

__all__ = ["model"]

NO_GPU: tuple[CudaDevice, ...] = ()


def test_ranks_that_have_no_part_are_refused_before_anything_is_loaded(model: ModelDescription) -> None:
    assert _resolve(model, tensor_parallel_size=2).parallel.tensor == 2
    for ranks, says in ((0, "at least 1"), (65, "at most 64"), (5, "exceeds the 4 heads")):
        with pytest.raises(ConfigError, match=says):
            _resolve(model, tensor_parallel_size=ranks)
    with pytest.raises(UnsupportedModelError, match="runs through the library"):
        _resolve(msgspec.structs.replace(model, spec=None), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="compute on CPUs only"):
        _resolve(model, H100, H100, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="cores binds the threads of one rank"):
        _resolve(model, cores=(0, 1), tensor_parallel_size=2)


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
    for settings, gpus, problem in (
        ({"data_parallel_size": 65}, NO_GPU, "data_parallel_size must be at most 64, got 65"),
        ({"data_parallel_size": 0}, NO_GPU, "data_parallel_size must be at least 1, got 0"),
        ({"data_parallel_size": 2, "cores": (0, 1)}, NO_GPU, "cores binds the threads of one replica"),
        ({"data_parallel_size": 2, "device": "cuda"}, (H100,), "each needs a GPU, and there are 1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            _resolve(model, *gpus, **settings)
    memory = machine().memory_bytes
    assert _resolve(model, swap_space=memory // 2 + 1).cache.swap_space == memory // 2 + 1
    with pytest.raises(ConfigError, match="exceeds a replica's share of the machine's memory"):
        _resolve(model, data_parallel_size=2, swap_space=memory // 2 + 1)
    with pytest.raises(ConfigError, match="exceeds a replica's share of this machine's memory"):
        _resolve(model, data_parallel_size=2, kv_cache_memory=memory // 2 + 1)
