"""What an executor says of the model that it has loaded, and of what it has made ready."""

from __future__ import annotations

import msgspec

from engine.layer_groups import Window


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor found out when it loaded the model; bytes."""

    weight_bytes: int
    activation_bytes: int
    """peak of a step at the full token budget"""
    workspace_bytes: int
    """tables, sampler state, attention workspace"""
    graph_bytes: int = 0
    """what captured graphs will take, estimated"""
    block_bytes: int
    """one KV block over all layers of a group"""
    windows: tuple[Window, ...] = (None,)
    """of each layer group"""
    device_bytes_total: int
    device_bytes_free: int
    """before anything was loaded"""
    attention_backend: str
    exact_lengths: bool = False
    """attention has to be told by the host how long each sequence is: nothing is planned behind drafts"""


class WarmUpReport(msgspec.Struct, frozen=True, kw_only=True):
    distinct_pieces: int = 0
    compiled: int = 0
    """pieces compiled now; the rest came from the cache"""
    reused: int = 0
    seconds: float = 0.0
    graph_bytes: int = 0
    """what the graphs captured so far took of the device, measured"""
    graphs_captured: int = 0
    graphs_pending: int = 0
    """captured later, between steps"""
    swap_block_s: float = 0.0
    """a block to the host tier and back, measured; 0: there is no tier"""
    compile_failed: bool = False
    """pieces were wanted and failed on this device: the model itself runs"""
