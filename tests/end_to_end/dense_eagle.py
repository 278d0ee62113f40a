"""An EAGLE-3 head over one whole sequence, written down from the paper in plain torch: an oracle, and what tests
train. Its parameters have the names of public checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.theta = config["hidden_size"], config["rope_theta"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or hidden // self.heads
        self.q_proj = nn.Linear(2 * hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]], visible: Tensor) -> Tensor:
        """`past`: keys and values of earlier calls, to which this one's are added; `visible` bool [n, all keys]."""
        q, k, v = (
            linear(x).view(len(x), heads, self.dim).transpose(0, 1)
            for linear, heads in ((self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads))
        )
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        past.append((k, v))
        keys, values = (torch.cat([pair[at] for pair in past], dim=1) for at in (0, 1))
        groups = self.heads // self.kv_heads
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
        out = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=visible)[0]
        projected: Tensor = self.o_proj(out.transpose(0, 1).flatten(1))
        return projected

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] * self.theta ** -(torch.arange(0, self.dim, 2) / self.dim)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self.self_attn = _Attention(config)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.hidden_norm, self.input_layernorm = _RMSNorm(hidden, eps), _RMSNorm(hidden, eps)
        self.post_attention_layernorm = _RMSNorm(hidden, eps)


class DenseEagle(nn.Module):
    """`config`: as in a checkpoint, with `rope_theta`. `target_ids` int64 [draft_vocab_size]: the tokens it guesses."""

    def __init__(self, config: dict[str, Any], target_ids: Tensor) -> None:
        super().__init__()
        self.config, self.target_ids = config, target_ids
        hidden = config["hidden_size"]
        self.fc = nn.Linear(3 * config.get("target_hidden_size", hidden), hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = _RMSNorm(hidden, config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, len(target_ids), bias=False)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]], visible: Tensor
    ) -> Tensor:
        """Fused or own hidden states [n, hidden_size], with the embeddings of the tokens behind them."""
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)
        hidden = hidden + layer.self_attn(x, positions, past, visible)
        y = layer.post_attention_layernorm(hidden)
        mlp = layer.mlp
        return hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))

    def logits(self, hidden: Tensor) -> Tensor:
        """Over `target_ids`."""
        found: Tensor = self.lm_head(self.norm(hidden))
        return found

    @torch.no_grad()
    def drafts(self, tokens: list[int], shown: Tensor, embedding: Tensor, count: int) -> list[int]:
        """Greedy ones behind `tokens`; `shown` [len(tokens) - 1, 3 * hidden_size]: of the target, of all but the
        last."""
        n, past = len(shown), []
        at = torch.arange(n)
        embedded = embedding[torch.tensor(tokens[1:])]
        hidden = self.forward(embedded, self.fc(shown), at, past, at[None] <= at[:, None])[-1:]
        found: list[int] = []
        while True:
            found.append(int(self.target_ids[self.logits(hidden).argmax()]))
            if len(found) == count:
                return found
            position = torch.tensor([n + len(found) - 1])
            everything = torch.ones(1, n + len(found), dtype=torch.bool)
            hidden = self.forward(embedding[found[-1:]], hidden, position, past, everything)

    def save(self, directory: Path) -> str:
        """As a public checkpoint."""
        directory.mkdir(exist_ok=True)
        size = len(self.target_ids)
        config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size, **self.config}
        (directory / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        covered = torch.zeros(self.config["vocab_size"], dtype=torch.bool)
        covered[self.target_ids] = True
        tensors |= {"d2t": self.target_ids - torch.arange(size), "t2d": covered}
        save_file(tensors, str(directory / "model.safetensors"))
        return str(directory)
