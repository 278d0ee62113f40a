"""What a step needs beside weights and KV: figures for the memory ledger, before the KV cache is sized."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from engine.models.spec import DecoderSpec
from engine.runner.drafts import DraftParts
from engine.runner.loading import CausalModel, RunnerParts

_LOGITS_COPIES = 3
"""float32 logits, what sampling masks them into, and one temporary of the same size"""


def estimate_activation_bytes(spec: DecoderSpec, dtype_bytes: int, max_tokens: int, max_samples: int) -> int:
    """Upper estimate of a step's peak in bytes, from shapes alone (CPU, where a dummy step at full budget takes
    seconds).

    Of the layers only one is alive at a time. Its widest moments are attention (residual, normed input, merged QKV,
    rotated q and k, attention output) and the MLP (residual, normed input, merged gate and up, their product, the
    output and its norm); norms work in float32. The logits of `max_samples` positions come on top, float32.
    """
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = 2 * spec.hidden_size + (q + 2 * kv) + (q + kv) + q
    outputs = 2 if spec.norm_placement == "before" else 3
    mlp = (1 + outputs) * spec.hidden_size + (3 if spec.gated else 2) * spec.intermediate_size
    norm = 4 * spec.hidden_size * 2
    per_token = max(attention, mlp) * dtype_bytes + norm
    return max_tokens * per_token + logits_bytes(spec.vocab_size, max_samples)


def activation_bytes(parts: RunnerParts, device: torch.device, max_tokens: int, max_samples: int) -> int:
    """A step's peak in bytes, a draft's included: measured on a CUDA device, else estimated."""
    size = parts.dtype.itemsize
    if device.type == "cuda":
        own = measure_activation_bytes(parts.model, parts.spec, device, max_tokens, max_samples)
    else:
        own = estimate_activation_bytes(parts.spec, size, max_tokens, max_samples)
    return own if parts.draft is None else own + _draft_bytes(parts.draft, size, max_tokens, max_samples)


def _draft_bytes(draft: DraftParts, dtype_bytes: int, max_tokens: int, max_samples: int) -> int:
    """With what the target shows it, and what a head keeps of every row."""
    spec = draft.spec
    shown = 4 * spec.hidden_size * dtype_bytes * (max_tokens + max_samples)
    return shown + estimate_activation_bytes(spec, dtype_bytes, max_tokens, max_samples)


def measure_activation_bytes(
    model: CausalModel, spec: DecoderSpec, device: torch.device, max_tokens: int, max_samples: int
) -> int:
    """Peak of a real step at the full budget on a CUDA device, with attention left out: its workspace is the backend's.

    Leaves the model with a stand-in for attention; the caller binds the real one.
    """
    model.set_attention(lambda q, k, v, out, layer: _fill_with_zero(out))
    ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        hidden = model(ids, ids)
        model.compute_logits(hidden[:max_samples])
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    return max(peak, 0) + logits_bytes(spec.vocab_size, min(max_samples, max_tokens))


def _fill_with_zero(out: torch.Tensor) -> None:
    out.zero_()


def logits_bytes(vocab_size: int, max_samples: int) -> int:
    """Logits of a step and what sampling makes of them; bytes."""
    return _LOGITS_COPIES * 4 * vocab_size * max_samples


def device_memory(device: torch.device) -> tuple[int, int]:
    """(total, free) bytes of the device; on CPU what the machine, or the control group around it, grants."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total), int(free)
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None and limit < total:
        total, free = limit, min(free, max(limit - used, 0))
    return total, free


def _cgroup_bytes(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
