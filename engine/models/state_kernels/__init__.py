"""States on GPUs, in Triton: their bytes out of the pages where they lie and back, and a token of each of several
sequences. What these equal is torch's: `StateCaches.read` and `write`, and `recurrence.one_token`. Triton is imported
only when a CUDA device asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

PIECE_BYTES = 16 << 10
"""that one program moves"""


class Piece(NamedTuple):
    """Bytes of a layer's state that lie one behind the other; all multiples of four."""

    address: int
    """of the first one in block 0"""
    stride: int
    """from a block to the next"""
    page: int
    """of a bundle"""
    at: int
    """in the state"""
    size: int


class StateKernels(Protocol):
    """Every function returns at once: work is queued on the current stream."""

    def move(
        self, pieces: torch.Tensor, blocks: torch.Tensor, firsts: torch.Tensor, states: torch.Tensor, write: bool
    ) -> None:
        """From the pages into `states`, or, with `write`, from there into the pages.

        pieces int64 [pieces, 5], as `Piece` has them, none larger than PIECE_BYTES; blocks int64 [blocks, pages];
        firsts int64 [n]: each bundle's first block; states uint8 [n, bytes].
        """
        ...

    def convolve(
        self, inputs: torch.Tensor, own: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """float32 [tokens, channels]: sums over each channel's last `taps` inputs, a token's own the last.

        inputs [all inputs, channels] contiguous; own int64 [tokens]: where a token's is; weight [channels, 1, taps];
        bias [channels].
        """
        ...

    def one_token(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        state: torch.Tensor,
        single: torch.Tensor,
        made: torch.Tensor,
        written: torch.Tensor,
    ) -> None:
        """As `recurrence.recur` does for `single` [3, n] (sequences, tokens, writes), into `made` and `written`."""
        ...


@dataclass(frozen=True)
class KernelSignature:
    """What the ahead-of-time check compiles: one Triton kernel with the types that its launcher passes."""

    name: str
    """attribute of `engine.models.state_kernels.device`"""
    signature: dict[str, str]
    constexprs: dict[str, int]


def _one_token(keys: int, values: int, decays: int, delta: int) -> KernelSignature:
    block = value_block(keys, values)
    return KernelSignature(
        name="one_token_kernel",
        signature={
            **dict.fromkeys(("q", "k", "v", "log_decay", "beta", "state"), "*fp32"),
            "single": "*i64",
            "made": "*fp32",
            "written": "*fp32",
            **dict.fromkeys(("count", "heads", "per_group"), "i32"),
        },
        constexprs={
            "KEYS": keys,
            "VALUES": values,
            "DECAYS": decays,
            "DELTA": delta,
            "KEY_BLOCK": 1 << (keys - 1).bit_length(),
            "BLOCK": block,
        },
    )


def _convolve(dtype: str, bias: int) -> KernelSignature:
    return KernelSignature(
        name="convolve_kernel",
        signature={
            "inputs": dtype,
            "own": "*i64",
            "weight": dtype,
            "bias": dtype,
            "sums": "*fp32",
            "channels": "i32",
        },
        constexprs={"TAPS": 4, "BIAS": bias, "BLOCK": 512},
    )


def value_block(keys: int, values: int) -> int:
    """Columns of a matrix that one program of `one_token` has in its registers: some 8 KB."""
    wanted = max(16, 2048 >> (keys - 1).bit_length())
    return min(wanted, 1 << (values - 1).bit_length())


KERNELS: tuple[KernelSignature, ...] = (
    *(
        KernelSignature(
            name="move_kernel",
            signature={
                **dict.fromkeys(("pieces", "blocks", "firsts"), "*i64"),
                "states": "*i32",
                **dict.fromkeys(("pages", "words"), "i32"),
            },
            constexprs={"WRITE": write, "BLOCK": 1024},
        )
        for write in (0, 1)
    ),
    _convolve("*bf16", 0),
    _convolve("*fp16", 1),
    _one_token(128, 128, 1, 1),
    _one_token(128, 128, 128, 1),
    _one_token(128, 64, 1, 0),
    _one_token(256, 80, 1, 0),
)
"""Discovery table: every entry is compiled for the supported GPUs without one."""


def device_kernels() -> StateKernels:
    """For CUDA."""
    from engine.models.state_kernels.device import TritonKernels

    return TritonKernels()
