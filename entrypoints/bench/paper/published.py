"""The paper's values. Ranges and ratios are from its text (§6, §7); single values from the labels on its bars (Fig. 2,
13 and 15)."""

from __future__ import annotations

from entrypoints.bench.paper.figure import Published, exactly

MEMORY: dict[str, tuple[float, float, float, float]] = {
    "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    "ours": (96.3, 0.0, 0.0, 3.7),
}
"""Fig. 2, % of KV memory: token states, kept for tokens to come, kept for tokens that never come (internal
fragmentation), fragmentation outside and the rest"""

BATCHED: dict[str, dict[str, float]] = {
    "ShareGPT": {"Orca (Max)": 7.0, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "ours": 30.42},
    "Alpaca": {"Orca (Max)": 7.0, "Orca (Pow2)": 43.24, "Orca (Oracle)": 72.75, "ours": 132.44},
}
"""Fig. 13, requests in a batch at 2/s and 30/s"""
BATCHED_RATES = {"ShareGPT": 2.0, "Alpaca": 30.0}

RATE_OVER_ORACLE = Published(1.7, 2.7, "x")
RATE_OVER_MAX = Published(2.7, 8.0, "x")
RATE_OVER_STATIC = Published(1.0, 22.0, "x", 0)
"""sustained rates on ShareGPT, §6.2; "up to 22x" over FasterTransformer"""

OVER_ORACLE_BASIC = exactly(1.3, "x")
OVER_ORACLE_BEAM_6 = exactly(2.3, "x")
"""§6.3, OPT-13B on Alpaca"""

SAVED: dict[tuple[str, bool], Published] = {
    ("Alpaca", False): Published(6.1, 9.8, " %"),
    ("Alpaca", True): Published(37.6, 55.2, " %"),
    ("ShareGPT", False): Published(16.2, 30.5, " %"),
    ("ShareGPT", True): Published(44.3, 66.3, " %"),
}
"""(lengths, beams) → memory saved by sharing with 2 to 6 sequences, §6.3"""
SAVED_BARS = {
    False: {2: 6.09, 4: 8.53, 6: 9.79},
    True: {2: 37.56, 4: 53.13, 6: 55.16},
}
"""Fig. 15, Alpaca"""

PREFIX: dict[int, Published] = {1: exactly(1.67, "x", 2), 5: exactly(3.58, "x", 2)}
"""examples in the prefix → throughput over Orca (Oracle), §6.4"""

CHAT_OVER_ORCA = exactly(2.0, "x")
"""§6.5, over all three"""

RECOMPUTE_OVER_SWAP = Published(0.0, 1.2, "x")
COMPARABLE = Published(0.9, 1.1, "x")
"""§7.3: recomputing is "never higher than 20% of swapping's latency", which is read as at most 1.2x of it; from 16 to
64 both are "comparable", which has no number: 10 % is taken"""
