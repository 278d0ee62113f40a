"""How many of the places that wait one tenant may take."""

from __future__ import annotations

OWN_OF_LEFT = 7
"""a tenant's sequences that wait, of places that are left"""


def most_of_one(left: int, new: int) -> int:
    """One tenant's are so many times what is left at most, and one request always: others find a place beside a flood
    (dynamic thresholds, as buffers are shared in switches: Choudhury and Hahne 1998)."""
    return max(OWN_OF_LEFT * left, new)
