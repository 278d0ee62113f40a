"""A model's own head for multi-token prediction (`engine.models.mtp_spec`): one more layer of its family.

At a position it is given the embedding of the next token and what the model, or itself, made of this one, each behind a
norm, and makes what the model would make of the next one, from which the token behind that is guessed (DeepSeek-V3,
2024, section 2.2). Checkpoints have the embedding's half of the joining matrix first.
"""

from __future__ import annotations

import torch

from engine.models.decoder import Decoder
from engine.models.decoder_layer import Acts, AnyLinear, Attend
from engine.models.layers import NORMS, Linear
from engine.models.mtp_spec import MtpSpec


class MtpHead(Decoder):
    """Weights are uninitialised until `engine.weights.loader.load_mtp` fills them; the tables are the target's."""

    fc: AnyLinear
    _target: Decoder

    def __init__(self, spec: MtpSpec, target: Decoder, *, max_position: int) -> None:
        layer, device = spec.layer, next(target.parameters()).device
        super().__init__(layer, dtype=target.dtype, device=device, max_position=max_position)
        hidden = layer.hidden_size
        self.next_norm, self.hidden_norm = (
            NORMS[layer.norm](hidden, layer.norm_eps, target.dtype, device) for _ in range(2)
        )
        self.fc = Linear(2 * hidden, hidden, False, target.dtype, device)
        object.__setattr__(self, "_target", target)  # no part of this module, whose weights are counted

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    def fuse(self, shown: torch.Tensor) -> torch.Tensor:
        """See `DraftHead`: the target's last hidden states, behind its final norm."""
        return shown

    def guess(
        self, next_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, index: int
    ) -> torch.Tensor:
        """See `DraftHead`."""
        embedded = self._target.embed_tokens(next_ids)
        joined = self.fc(torch.cat((self.next_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        (rope,) = (rope(positions, self.dtype) for rope in self.ropes)
        (layer,) = self.layers
        made = layer(joined, rope, Acts(attend, index, self.mix, 0))
        assert self.norm is not None
        normed: torch.Tensor = self.norm(made)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """By the target's unembedding."""
        return self._target.compute_logits(hidden)
