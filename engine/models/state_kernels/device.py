"""The kernels of states in Triton. Importing this module needs Triton; `device_kernels` does so only for CUDA.

Integers that change from step to step are never specialised on their value, so nothing compiles again after warm-up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.models.state_kernels import value_block

_WORDS = 1024
"""of 32 bits that a program moves at a time"""
_CHANNELS = 512
"""that a program sums up"""


@triton.jit(do_not_specialize=["pages", "words"], do_not_specialize_on_alignment=["firsts", "states"])
def move_kernel(
    pieces: tl.tensor,
    blocks: tl.tensor,
    firsts: tl.tensor,
    states: tl.tensor,
    pages: tl.tensor,
    words: tl.tensor,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    piece = pieces + tl.program_id(0) * 5
    sequence = tl.program_id(1)
    first = tl.load(firsts + sequence)
    block = tl.load(blocks + first * pages + tl.load(piece + 2))
    page = (tl.load(piece) + block * tl.load(piece + 1)).to(tl.pointer_type(tl.int32))
    state = states + sequence.to(tl.int64) * words + tl.load(piece + 3) // 4
    length = (tl.load(piece + 4) // 4).to(tl.int32)
    for begin in range(0, length, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        mask = index < length
        if WRITE:
            tl.store(page + index, tl.load(state + index, mask=mask), mask=mask)
        else:
            tl.store(state + index, tl.load(page + index, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["single"])
def one_token_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    state: tl.tensor,
    single: tl.tensor,
    made: tl.tensor,
    written: tl.tensor,
    count: tl.tensor,
    heads: tl.tensor,
    per_group: tl.tensor,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DECAYS: tl.constexpr,
    DELTA: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(single + index)
    token = tl.load(single + count + index)
    write = tl.load(single + 2 * count + index)
    groups = heads // per_group
    key = tl.arange(0, KEY_BLOCK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_keys, in_values = key < KEYS, column < VALUES
    inside = in_keys[:, None] & in_values[None, :]
    of_key = (token * groups + head // per_group) * KEYS + key
    queries = tl.load(q + of_key, mask=in_keys, other=0.0)
    keys = tl.load(k + of_key, mask=in_keys, other=0.0)
    values = tl.load(v + (token * heads + head) * VALUES + column, mask=in_values, other=0.0)
    at = key[:, None] * VALUES + column[None, :]
    matrix = tl.load(state + (sequence * heads + head) * (KEYS * VALUES) + at, mask=inside, other=0.0)
    if DECAYS == 1:
        matrix = matrix * tl.exp(tl.load(log_decay + token * heads + head))
    else:
        decay = tl.load(log_decay + (token * heads + head) * KEYS + key, mask=in_keys, other=0.0)
        matrix = matrix * tl.exp(decay)[:, None]
    if DELTA:
        held = tl.sum(matrix * keys[:, None], axis=0)
        values = (values - held) * tl.load(beta + token * heads + head)
    matrix = matrix + keys[:, None] * values[None, :]
    tl.store(made + (token * heads + head) * VALUES + column, tl.sum(matrix * queries[:, None], axis=0), mask=in_values)
    tl.store(written + (write * heads + head) * (KEYS * VALUES) + at, matrix, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["own"])
def convolve_kernel(
    inputs: tl.tensor,
    own: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    sums: tl.tensor,
    channels: tl.tensor,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    first = inputs + (tl.load(own + token) - (TAPS - 1)) * channels + channel
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        given = tl.load(first + tap * channels, mask=mask, other=0.0).to(tl.float32)
        total += given * tl.load(weight + channel * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(sums + token * channels + channel, total, mask=mask)


class TritonKernels:
    """See `StateKernels`."""

    def convolve(
        self, inputs: torch.Tensor, own: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        channels, _, taps = weight.shape
        sums = torch.empty(len(own), channels, dtype=torch.float32, device=inputs.device)
        if len(own):
            convolve_kernel[(len(own), triton.cdiv(channels, _CHANNELS))](
                inputs,
                own,
                weight,
                weight if bias is None else bias,
                sums,
                channels,
                TAPS=taps,
                BIAS=int(bias is not None),
                BLOCK=_CHANNELS,
            )
        return sums

    def move(
        self, pieces: torch.Tensor, blocks: torch.Tensor, firsts: torch.Tensor, states: torch.Tensor, write: bool
    ) -> None:
        if len(firsts) == 0:
            return
        words = states.view(torch.int32)
        move_kernel[(len(pieces), len(firsts))](
            pieces, blocks, firsts, words, blocks.size(1), words.size(1), WRITE=int(write), BLOCK=_WORDS
        )

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
        count, (heads, values), (groups, keys) = single.size(1), v.shape[1:], k.shape[1:]
        if count == 0:
            return
        block = value_block(keys, values)
        one_token_kernel[(count, heads, triton.cdiv(values, block))](
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            log_decay.contiguous(),
            v if beta is None else beta.contiguous(),
            state,
            single.contiguous(),
            made,
            written,
            count,
            heads,
            heads // groups,
            KEYS=keys,
            VALUES=values,
            DECAYS=log_decay.size(2),
            DELTA=int(beta is not None),
            KEY_BLOCK=1 << (keys - 1).bit_length(),
            BLOCK=block,
        )
