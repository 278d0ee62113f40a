"""Which adapter a request is answered with, as vLLM says it."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter. Two of them are the same where all fields are: a directory whose files have changed needs another
    name or id, for of this one what was read before may be served on, and prefixes are."""

    lora_name: str
    lora_int_id: int
    """at least 1"""
    lora_path: str
    """a directory as PEFT saves it"""
    version: str = ""
    """what its files hold, as `AsyncEngine.checked_lora` found them: they are not served if they hold something else
    when they are read; empty: whatever they hold"""

    @property
    def key(self) -> str:
        """What prefixes that were computed with it are found by."""
        return f"{self.lora_int_id}\0{self.lora_name}\0{self.lora_path}\0{self.version}"
