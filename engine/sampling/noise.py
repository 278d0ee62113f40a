"""Random numbers that depend on (seed, position, token id) and on nothing else.

A stateful generator would tie a request's tokens to its place in the batch and to the requests beside it. Here every
draw is a hash, so a seeded request gives the same tokens in any batch and any row, and after a preemption.

The algorithm, in unsigned 32-bit arithmetic (all sums and products modulo 2^32; `>>` logical), is meant to be
repeated by other kernels bit for bit:

    mix(x)     : x ^= x>>16; x *= 0x7feb352d; x ^= x>>15; x *= 0x846ca68b; x ^= x>>16         (Ellis, "lowbias32")
    seed words : (a, b) = low and high half of splitmix64's finalizer applied to the 64-bit seed
    draw keys  : k0 = mix(a + position * 0x9e3779b9), k1 = mix(b + position * 0x85ebca6b)
    token      : x = token * 0x9e3779b9 + k0;  x ^= x>>16; x *= 0x7feb352d; x += k1; x ^= x>>15; x *= 0x846ca68b
    31 bits    : n = (x ^ (x >> 16 arithmetic)) as a non-negative integer
    exponential: E = -log1p(-(n + 0.5) * c) in float32, c = 2^-31 * (1 - 2^-24)

`-log(E)` is a Gumbel variable. The form keeps full relative precision where E is small, which is where winners come
from; c keeps E finite. E lies in [2.3e-10, 16.7].
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B9
_POSITION_STEPS = (0x9E3779B9, 0x85EBCA6B)
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B
_MASK_64 = (1 << 64) - 1
_UNIT = 2.0**-31 * (1.0 - 2.0**-24)


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of the low `bits` bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def seed_words(seed: int) -> int:
    """Both seed words of a 64-bit seed in one signed 64-bit integer: a in the low half, b in the high half."""
    x = (seed + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return _signed(x ^ (x >> 31), 64)


def _xor_shift_(x: torch.Tensor, shift: int) -> torch.Tensor:
    """x ^= x >> shift, logical, on int32."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


class Noise:
    """Draws for one vocabulary; holds the token words, `[vocab_size]` int32."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        token_words = torch.arange(vocab_size, dtype=torch.int64, device=device) * _GOLDEN
        self._token_words = token_words.to(torch.int32)
        self._steps = torch.tensor([_signed(step, 32) for step in _POSITION_STEPS], dtype=torch.int32, device=device)

    @property
    def size_bytes(self) -> int:
        return self._token_words.nbytes + self._steps.nbytes

    def draw_keys(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys int32 `[m, 2]` from `seed_words` int64 `[m]` and positions int64 `[m]`."""
        pairs = torch.stack((words, words >> 32), dim=1).to(torch.int32)
        x = positions.to(torch.int32).unsqueeze(1) * self._steps + pairs
        _xor_shift_(x, 16).mul_(_signed(_MULTIPLIER_1, 32))
        _xor_shift_(x, 15).mul_(_signed(_MULTIPLIER_2, 32))
        return _xor_shift_(x, 16)

    def bits(self, keys: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """31 random bits, int32 `[m, n]`: one for each of `token_ids` int64 `[m, n]`, or for the whole vocabulary."""
        words = self._token_words if token_ids is None else self._token_words[token_ids]
        x = words + keys[:, :1]
        _xor_shift_(x, 16).mul_(_signed(_MULTIPLIER_1, 32)).add_(keys[:, 1:])
        _xor_shift_(x, 15).mul_(_signed(_MULTIPLIER_2, 32))
        return x.bitwise_xor_(x >> 16)

    def log_exponential(self, keys: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """log(E) float32 `[m, n]`, E exponential with mean 1; `argmax(log p - log E)` is a draw from p."""
        uniform = self.bits(keys, token_ids).to(torch.float32).add_(0.5)
        return uniform.mul_(-_UNIT).log1p_().neg_().log_()
