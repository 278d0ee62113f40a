"""What a step needs beside weights and KV, by shapes alone. Torch-free."""

from __future__ import annotations

from engine.models.facts import ModelFacts

_LOGITS_COPIES = 3
"""float32 logits, what sampling masks them into, and one temporary of the same size"""


def estimate_activation_bytes(model: ModelFacts, dtype_bytes: int, max_tokens: int, max_samples: int) -> int:
    """Upper estimate of a step's peak in bytes, from shapes alone (CPU, where a dummy step at full budget takes
    seconds).

    Of the layers only one is alive at a time. Its widest moments are attention (residual, normed input, merged QKV,
    rotated q and k, attention output) and the MLP (residual, normed input, merged gate and up, their product, the
    output and its norm); norms work in float32. The logits of `max_samples` positions come on top, float32.
    """
    heads = max((3 * layer.num_heads + 3 * layer.num_kv_heads) * layer.head_dim for layer in model.layers)
    norm = 4 * model.hidden_size * 2
    per_token = max(2 * model.hidden_size + heads, model.mlp_values) * dtype_bytes + norm
    return max_tokens * per_token + logits_bytes(model.vocab_size, max_samples)


def logits_bytes(vocab_size: int, max_samples: int) -> int:
    """Logits of a step and what sampling makes of them; bytes."""
    return _LOGITS_COPIES * 4 * vocab_size * max_samples


def estimate_workspace_bytes(max_rows: int, max_model_len: int, blocks: int) -> int:
    """Tables of tokens and blocks, and what penalties remember of each row; an attention backend's own comes on top.
    `blocks`: of a sequence of `max_model_len`."""
    return max_rows * (12 * max_model_len + 4 * blocks)
