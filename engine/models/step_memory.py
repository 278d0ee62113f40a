"""What a step needs beside weights and KV, by shapes alone. Torch-free."""

from __future__ import annotations

from engine.config import EngineConfig, SchedulerConfig
from engine.kv_budget import DTYPE_BYTES
from engine.models.facts import ConvFacts, HeadsSpec, ModelFacts, StateFacts
from engine.models.spec import DecoderSpec

_LOGITS_COPIES = 3
"""float32 logits, what sampling masks them into, and one temporary of the same size"""


def estimate_step_bytes(
    config: EngineConfig,
    own: ModelFacts,
    *,
    makes_logits: bool = True,
    whole: ModelFacts | None = None,
    exchanged: DecoderSpec | None = None,
    draft: ModelFacts | None = None,
) -> int:
    """Upper estimate of a rank's peak in a step of the full budget, in bytes. `own`: what it computes; `whole`: the
    model, if ranks divide its positions; `exchanged`: the model, if replicas divide its experts; `draft`: its layers.
    """
    scheduler, size = config.scheduler, DTYPE_BYTES[config.model.dtype]
    tokens, samples = scheduler.max_num_batched_tokens, scheduler.max_sampled
    found = estimate_activation_bytes(own, size, tokens, samples if makes_logits else 0)
    found += replayed_bytes(own, size, scheduler)
    if whole is not None:
        found += tokens * _context_row_bytes(whole, own, config.parallel.context, size)
    if exchanged is not None:
        found += config.parallel.data * tokens * _exchange_row_bytes(exchanged, size)
        found += _moving_bytes(exchanged, size) if config.parallel.eplb is not None else 0
    return found if draft is None else found + draft_bytes(draft, size, tokens, samples)


def draft_bytes(draft: ModelFacts, dtype_bytes: int, max_tokens: int, max_samples: int) -> int:
    """Of a draft's step, with what the target shows it, and what a head keeps of every row."""
    shown = 4 * draft.hidden_size * dtype_bytes * (max_tokens + max_samples)
    return shown + estimate_activation_bytes(draft, dtype_bytes, max_tokens, max_samples)


def replayed_bytes(facts: ModelFacts, dtype_bytes: int, scheduler: SchedulerConfig) -> int:
    """What layers with states were given for drafts, kept until the next step of the sequence, and what one of them is
    given there, these before a step's own tokens."""
    if not facts.states or not scheduler.speculation.num_speculative_tokens:
        return 0
    rows = [each.given_size * dtype_bytes for each in facts.states]
    drafts = scheduler.max_drafts * scheduler.steps_in_flight
    return drafts * sum(rows) + (scheduler.max_num_batched_tokens + drafts) * max(rows)


def _context_row_bytes(whole: ModelFacts, own: ModelFacts, ranks: int, size: int) -> int:
    """Of a token, in the layer that needs most: all heads, and what this rank and then all of them found."""
    rows = []
    for layer, dealt in zip(whole.layers, own.layers, strict=True):
        found = 4 * (layer.head_dim + 1) * (layer.num_heads + ranks * dealt.num_heads)
        rows.append(3 * size * layer.head_dim * (layer.num_heads + 2 * layer.num_kv_heads) + found)
    return max(rows)


def _exchange_row_bytes(spec: DecoderSpec, size: int) -> int:
    """Of a token of any replica, in the layer that needs most: its row, what was chosen for it, and what experts make
    of that."""
    hidden, rows = spec.hidden_size, []
    for experts in (layer.experts for layer in spec.layers if layer.experts is not None):
        choice = 32 + 4 * (3 * experts.inner_size + hidden) + 3 * hidden * size
        rows.append(hidden * size + experts.router.top_k * choice)
    return max(rows)


def _moving_bytes(spec: DecoderSpec, size: int) -> int:
    """Of two experts that are shown at once, as if they were not packed."""
    return max(4 * layer.experts.inner_size * spec.hidden_size * size for layer in spec.layers if layer.experts)


def estimate_activation_bytes(model: ModelFacts, dtype_bytes: int, max_tokens: int, max_samples: int) -> int:
    """Upper estimate of a step's peak in bytes, from shapes alone (CPU, where a dummy step at full budget takes
    seconds).

    Of the layers only one is alive at a time. Its widest moments are attention (residual, normed input, merged QKV,
    rotated q and k, attention output), or what keeps a state (what it is given and what it makes), and the MLP
    (residual, normed input, merged gate and up, their product, the output and its norm); norms work in float32. The
    logits of `max_samples` positions come on top, float32.
    """
    mixed = [*map(_head_values, model.layers), *map(_state_values, model.states)]
    norm = 4 * model.hidden_size * 2
    per_token = max(2 * model.hidden_size + max(mixed), model.mlp_values) * dtype_bytes + norm
    return max_tokens * per_token + logits_bytes(model.vocab_size, max_samples)


def _head_values(layer: HeadsSpec) -> int:
    """Of a token: merged QKV, rotated q and k, and what is found; with latents also queries that have taken the keys'
    matrix in, and what is found before it meets the values'."""
    if layer.latent is None:
        return (3 * layer.num_heads + 3 * layer.num_kv_heads) * layer.head_dim
    absorbed = 2 * layer.num_heads * layer.latent.row_size
    return layer.num_heads * (3 * layer.query_dim + layer.out_dim) + absorbed + 3 * layer.latent.row_size


def _state_values(facts: StateFacts) -> int:
    if isinstance(facts, ConvFacts):
        return 4 * facts.channels
    heads, _, values = facts.matrices
    return facts.channels + 2 * heads * (values + 1)


def logits_bytes(vocab_size: int, max_samples: int) -> int:
    """Logits of a step and what sampling makes of them; bytes."""
    return _LOGITS_COPIES * 4 * vocab_size * max_samples


def estimate_workspace_bytes(max_rows: int, max_model_len: int, blocks: int) -> int:
    """Tables of tokens and blocks, and what penalties remember of each row; an attention backend's own comes on top.
    `blocks`: of a sequence of `max_model_len`."""
    return max_rows * (12 * max_model_len + 4 * blocks)
