"""Where each sampling parameter stands in the device tables that `Sampler.add` fills; row first."""

from __future__ import annotations

FLOATS, INTS = 0, 1
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_FLOATS = range(7)
"""float32 table; temperature is 0 exactly where the row takes the first token without a draw"""
SEED_WORDS, TOP_K, PROMPT_LEN, SLOT, NUM_INTS = range(5)
"""int64 table; top-k is 0 where it keeps everything; the slot in `SeenTokens` is -1 without penalties"""
