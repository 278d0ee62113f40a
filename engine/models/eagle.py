"""An EAGLE-3 head (`engine.models.eagle_spec`) as a module over a flat batch of tokens, with attention from outside."""

from __future__ import annotations

import torch
from torch import nn

from engine.models.decoder_layer import AnyLinear, Attend, DecoderLayer
from engine.models.eagle_spec import NUM_SHOWN, EagleSpec
from engine.models.layers import NORMS, Linear, RMSNorm
from engine.models.rope import RopeTable


class EagleLayer(DecoderLayer):
    """A decoder layer whose attention sees, beside what it adds to, the embedding of the next token."""

    def __init__(self, spec: EagleSpec, dtype: torch.dtype, device: torch.device) -> None:
        layer = spec.layer.layers[0]
        super().__init__(spec.layer, layer, dtype, device)
        hidden = spec.layer.hidden_size
        self.hidden_norm = NORMS["rms"](hidden, spec.layer.norm_eps, dtype, device)
        self.qkv_proj = Linear(2 * hidden, layer.attention.qkv_size, layer.attention.qkv_bias, dtype, device)
        self._norm_before_residual = spec.norm_before_residual

    def guess(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rope: torch.Tensor | None, attend: Attend, index: int
    ) -> torch.Tensor:
        """embedded, hidden [tokens, hidden_size] → [tokens, hidden_size]. `index`: of the layer, for `attend`."""
        assert self.input_norm is not None and self.gate_up_proj is not None and self.down_proj is not None
        normed = self.hidden_norm(hidden)
        qkv = self.qkv_proj(torch.cat((self.input_norm(embedded), normed), dim=-1))
        residual = normed if self._norm_before_residual else hidden
        hidden = self.o_proj(self.attended(qkv, rope, attend, index), residual=residual)
        added: torch.Tensor = self.down_proj(self.gate_up_proj(hidden, self.mlp_norm), residual=hidden)
        return added


class EagleHead(nn.Module):
    """Weights are uninitialised until `engine.weights.eagle_loader.load_eagle` fills them; the embedding may be the
    target's own module."""

    fc: AnyLinear
    lm_head: AnyLinear

    def __init__(
        self,
        spec: EagleSpec,
        embed_tokens: nn.Module,
        *,
        dtype: torch.dtype,
        max_position: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """`max_position`: positions that the rope table covers."""
        super().__init__()
        device, layer = torch.device(device), spec.layer
        self.spec, self.dtype = spec, dtype
        self.embed_tokens = embed_tokens
        self.fc = Linear(NUM_SHOWN * spec.target_hidden_size, layer.hidden_size, False, dtype, device)
        self.layer = EagleLayer(spec, dtype, device)
        self.norm = RMSNorm(layer.hidden_size, layer.norm_eps, dtype, device)
        self.lm_head = Linear(layer.hidden_size, spec.draft_vocab_size, False, dtype, device)
        self.target_ids: torch.Tensor | None = None
        """int64 [draft_vocab_size], ascending: the target's id of each token; None: the same"""
        (rope,) = layer.ropes
        self.rope = RopeTable(rope, max_position, device)

    @property
    def hidden_size(self) -> int:
        return self.spec.layer.hidden_size

    def fuse(self, shown: torch.Tensor) -> torch.Tensor:
        """See `DraftHead`: of what three layers of the target were given, behind its last hidden states."""
        fused: torch.Tensor = self.fc(shown[:, self.spec.target_hidden_size :].contiguous())
        return fused

    def guess(
        self, next_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, index: int
    ) -> torch.Tensor:
        """See `DraftHead`."""
        rope = self.rope(positions, self.dtype)
        return self.layer.guess(self.embed_tokens(next_ids), hidden, rope, attend, index)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] → float32 [rows, vocab_size of the target], -inf where it cannot guess."""
        logits: torch.Tensor = self.lm_head(hidden, self.norm).float()
        if self.target_ids is None:
            return logits
        every = torch.full((len(logits), self.spec.layer.vocab_size), -torch.inf, device=logits.device)
        every[:, self.target_ids] = logits
        return every
