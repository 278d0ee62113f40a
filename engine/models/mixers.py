"""What mixes tokens in a layer, as data: attention over heads or latents, and what keeps a state. Torch-free."""

from __future__ import annotations

import math
from typing import Literal

from engine.models.facts import ConvFacts, DeltaFacts, HeadsSpec, LatentFacts, MambaFacts

QkNorm = Literal["head", "row", "turned_head"]
"""a norm over each head of q and k; over the whole width of either; over each head when it has been turned"""
Values = Literal["own", "normed", "normed_keys"]
"""made by a matrix; then normed over each head, without weights; keys, before their norm and turn, normed so"""


class MixerSpec(HeadsSpec, frozen=True, kw_only=True):
    """A mixer of tokens: attention over heads that one matrix makes and another brings together."""

    qkv_bias: bool = False
    o_bias: bool = False
    gated: bool = False
    """the first matrix makes, before q, k and v, a gate of what the heads find"""
    qk_norm: QkNorm | None = None
    """of the model's kind"""
    qk_weights: bool = True
    """those norms have weights"""
    values: Values = "own"
    """of a layer with keys of its own"""
    rope: int | None = None
    """which of the model's ropes turns q and k; None: they are not turned"""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of the keys that it makes, and of its values."""
        return self.num_kv_heads * self.head_dim if self.shares is None else 0

    @property
    def first_size(self) -> int:
        """Outputs of the first matrix."""
        return self.qkv_size + self.q_size * self.gated

    @property
    def last_size(self) -> int:
        """Inputs of the last one."""
        return self.q_size

    @property
    def qkv_size(self) -> int:
        """Outputs of the one matrix that makes q, k and v."""
        return self.q_size + (1 if self.values == "normed_keys" else 2) * self.kv_size


class ConvSpec(ConvFacts, frozen=True, kw_only=True):
    """A mixer of tokens: one matrix makes b, c and x of each channel, and another brings c * conv(b * x) together."""

    bias: bool = False
    """of both matrices and of the convolution"""

    @property
    def first_size(self) -> int:
        """Outputs of the first matrix."""
        return self.given_size

    @property
    def last_size(self) -> int:
        """Inputs of the last one."""
        return self.channels


class LatentSpec(HeadsSpec, frozen=True, kw_only=True):
    """A mixer of tokens: attention whose keys and values are kept as one row a token. One matrix makes queries, or what
    another makes them of, and the row."""

    latent: LatentFacts
    q_lora_rank: int | None = None
    """of what queries are made of, behind a norm; None: the first matrix makes them"""
    norm_eps: float = 1e-6
    """of the norms of both latents"""
    rope: int | None
    """None: nothing is turned"""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.latent.qk_head_dim

    @property
    def first_size(self) -> int:
        """Outputs of the first matrix."""
        return (self.q_lora_rank or self.q_size) + self.latent.row_size

    @property
    def last_size(self) -> int:
        """Inputs of the last one."""
        return self.num_heads * self.latent.v_head_dim

    @property
    def inner_weights(self) -> int:
        """Of the matrices between them."""
        made = self.num_heads * self.latent.made_size * self.latent.kv_lora_rank
        return made + self.q_size * (self.q_lora_rank or 0)


class DeltaSpec(DeltaFacts, frozen=True, kw_only=True):
    """A gated delta net: one matrix makes queries, keys and values, a gate of what comes out, how much of each value
    is taken, and how much of the state is kept; another brings the heads together."""

    rank: int | None = None
    """of Kimi's delta attention: a sigmoid is the gate, and each number of a key is kept in a part of its own; matrices
    of their own make either of as many numbers, which the first one makes in their place"""

    @property
    def decay_size(self) -> int:
        """How much is kept: of each head, or of each number of its keys."""
        return self.value_heads * (1 if self.rank is None else self.key_dim)

    @property
    def given_size(self) -> int:
        """What is mixed: queries, keys and values, gates, parts of values, and what is kept."""
        return self.channels + self.value_size + self.value_heads + self.decay_size

    @property
    def first_size(self) -> int:
        """Outputs of the first matrix."""
        return self.given_size if self.rank is None else self.channels + self.value_heads + 2 * self.rank

    @property
    def last_size(self) -> int:
        """Inputs of the last one."""
        return self.value_size

    @property
    def inner_weights(self) -> int:
        """Of the matrices between them."""
        return (self.rank or 0) * (self.value_size + self.decay_size)


class MambaSpec(MambaFacts, frozen=True, kw_only=True):
    """Mamba 2: one matrix makes a gate of what comes out, values, keys and queries, and how much each value counts;
    another brings the heads together."""

    bias: bool = False
    """of both matrices"""
    conv_bias: bool = True
    amounts: tuple[float, float] = (0.0, math.inf)
    """between which a value counts"""
    normed: bool = True
    """what comes out, in groups, behind the gate"""
    norm_eps: float = 1e-6
    scales: tuple[float, float, float, float, float] | None = None
    """that gates, values, keys, queries and what says how much values count are multiplied with, as they come"""
    out_scale: float = 1.0
    """of what comes out"""

    @property
    def first_size(self) -> int:
        """Outputs of the first matrix."""
        return self.given_size

    @property
    def last_size(self) -> int:
        """Inputs of the last one."""
        return self.inner_size


StateSpec = ConvSpec | DeltaSpec | MambaSpec
