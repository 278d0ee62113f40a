"""Packed linear layers on CPUs: how weights are packed, and the operators that compute with them.

One packed layout for every number of rows (`csrc/linear.h`); packed weights are plain uint8 tensors, inputs of a
compiled piece like any other, so identical layers share one artifact. The operators live in a library that is compiled
on this machine once; their namespace names the build.
"""

from __future__ import annotations

from enum import IntEnum


class Format(IntEnum):
    """How weights are packed; numbers as in `csrc/linear.h`."""

    BFLOAT16 = 0
    INT8 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q6_K = 6
