"""What planners, the runner and attention must know of a model, however it is computed. Torch-free."""

from __future__ import annotations

import math

import msgspec

from engine.layer_groups import Chunk, Kept, Window


class LatentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of all heads are made of one row a token: a latent, and a key's turned part that heads have in
    common (multi-head latent attention: DeepSeek-V2, 2024, section 2.1). Names are DeepSeek's."""

    kv_lora_rank: int
    """of the latent, which comes first in a row"""
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    """of a head's keys, what is made of the latent"""
    v_head_dim: int

    @property
    def row_size(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def made_size(self) -> int:
        """What one head makes of a latent: a key and a value."""
        return self.qk_nope_head_dim + self.v_head_dim


class HeadsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's attention as a KV cache and an attention backend see it. Scores are `scale * q.k`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """usually head_dim ** -0.5"""
    window: int | None = None
    """a query at position p sees keys in (p - window, p]; None: all of [0, p]; an encoder's: as many on either side"""
    chunk: int | None = None
    """in the place of a window: a query at position p sees keys in [p // chunk * chunk, p] (Llama 4)"""
    soft_cap: float | None = None
    sinks: bool = False
    """a learned logit of each head joins the softmax (GPT-OSS)"""
    shares: int | None = None
    """an earlier layer with the same KV heads and window, whose keys and values it reads; it has none of its own"""
    latent: LatentFacts | None = None
    """what is kept is one row a token, of `head_dim` numbers, in the place of one head's key and value"""

    @property
    def kept_arrays(self) -> int:
        """Keys and values, or rows."""
        return 2 if self.latent is None else 1

    @property
    def kept_values(self) -> int:
        """Numbers of a token in the cache."""
        return self.kept_arrays * self.num_kv_heads * self.head_dim

    @property
    def query_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.qk_head_dim

    @property
    def out_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    @property
    def pair_products(self) -> int:
        """Multiplications of a query and what is kept of a token: for scores, and for values."""
        if self.latent is None:
            return 2 * self.num_heads * self.head_dim
        return self.num_heads * (self.latent.row_size + self.latent.kv_lora_rank)

    @property
    def span(self) -> Window:
        """Of what a query sees."""
        return self.window if self.chunk is None else Chunk(self.chunk)


class ConvFacts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One layer that keeps a state: a causal convolution of each channel over the last `taps` tokens, itself between
    two gates (LFM2's)."""

    channels: int
    taps: int

    @property
    def given_size(self) -> int:
        """What is mixed, of a token."""
        return 3 * self.channels

    def state_bytes(self, dtype_bytes: int) -> int:
        """What it keeps of a sequence: the convolution's last inputs, in the model's dtype."""
        return (self.taps - 1) * self.channels * dtype_bytes


class DeltaFacts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One layer that keeps a state: a matrix for each head, and the last inputs of a convolution before it (gated delta
    nets)."""

    key_heads: int
    value_heads: int
    """a multiple of those"""
    key_dim: int
    value_dim: int
    """of a head"""
    taps: int

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def given_size(self) -> int:
        """What is mixed, of a token."""
        return self.channels + self.value_size + 2 * self.value_heads

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Heads, keys, values."""
        return self.value_heads, self.key_dim, self.value_dim

    def inputs_bytes(self, dtype_bytes: int) -> int:
        """Of the convolution's last inputs, before the matrices."""
        return _inputs_bytes(self, dtype_bytes)

    def state_bytes(self, dtype_bytes: int) -> int:
        """What it keeps of a sequence: inputs in the model's dtype, and float32 matrices."""
        return self.inputs_bytes(dtype_bytes) + 4 * math.prod(self.matrices)


class MambaFacts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """As `DeltaFacts`, of Mamba 2."""

    heads: int
    head_dim: int
    groups: int
    """of heads, which share keys and queries"""
    state_size: int
    """of a key, and of a query"""
    taps: int

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: values, keys and queries."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def given_size(self) -> int:
        """What is mixed, of a token."""
        return self.inner_size + self.channels + self.heads

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Heads, keys, values."""
        return self.heads, self.state_size, self.head_dim

    def inputs_bytes(self, dtype_bytes: int) -> int:
        """Of the convolution's last inputs, before the matrices."""
        return _inputs_bytes(self, dtype_bytes)

    def state_bytes(self, dtype_bytes: int) -> int:
        """What it keeps of a sequence: inputs in the model's dtype, and float32 matrices."""
        return self.inputs_bytes(dtype_bytes) + 4 * math.prod(self.matrices)


def _inputs_bytes(facts: DeltaFacts | MambaFacts, dtype_bytes: int) -> int:
    return -(-(facts.taps - 1) * facts.channels * dtype_bytes // 64) * 64


StateFacts = ConvFacts | DeltaFacts | MambaFacts


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    vocab_size: int
    hidden_size: int
    """of a token's state between two layers"""
    final_size: int
    """of a token's last state, from which logits are made and prompts pooled"""
    layers: tuple[HeadsSpec, ...]
    """of every layer that attends"""
    states: tuple[StateFacts, ...] = ()
    """of every layer that keeps a state"""
    intermediate_size: int
    """of the widest MLP"""
    mlp_values: int
    """of one token, alive at once where an MLP is widest"""
    linear_weights: int
    """of all layers' matrices and tables, without biases and the unembedding"""
    active_weights: int
    """of those, what one token is multiplied with: of a mixture of experts the chosen ones"""
    tie_embeddings: bool
    max_position: int
    keeps_kv: bool = True
    """else an encoder: attention looks both ways, over prompts that are computed in one step"""
    token_types: int = 1
    """kinds that tokens come in: one of kind k is fed as its id + k * vocab_size"""
    rope_by_length: bool = False
    """how far positions turn keys depends on the longest sequence that can come"""

    @property
    def kept(self) -> tuple[Kept | None, ...]:
        """What each layer keeps of a sequence; None: it reads what another one keeps."""
        return tuple(
            Kept(layer.span if self.keeps_kv else None, layer.kept_values) if layer.shares is None else None
            for layer in self.layers
        )

    def state_sizes(self, dtype_bytes: int) -> list[int]:
        """Bytes that each layer with a state keeps of a sequence; `dtype_bytes`: of a number of the model's."""
        return [layer.state_bytes(dtype_bytes) for layer in self.states]

    @property
    def keeps_latents(self) -> bool:
        return any(layer.latent is not None for layer in self.layers)

    @property
    def num_token_ids(self) -> int:
        """That tokens may come as."""
        return self.vocab_size * self.token_types

    @property
    def num_layers(self) -> int:
        """That attend."""
        return len(self.layers)

    @property
    def row_tokens(self) -> int:
        """Of a context whose keys and values take as many operations as the weights that a token meets."""
        return max(self.active_weights // sum(layer.pair_products for layer in self.layers), 1)

    @property
    def parameters(self) -> int:
        """Of all matrices."""
        return self.linear_weights + self.vocab_size * self.final_size * (1 if self.tie_embeddings else 2)
