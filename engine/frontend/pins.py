"""The names of pinned prefixes, as the front end knows them: being pinned, or pinned with so many tokens."""

from __future__ import annotations

from engine.errors import InvalidRequestError
from engine.frontend.texts import check_name
from engine.limits import Limits


class PinnedPrefixes:
    """A name is `reserve`d before its prefix is computed, and then `complete`d or `release`d: nobody else can take it
    meanwhile. Whoever releases a name tells the core to unpin it, which may know it already."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tokens: dict[str, int | None] = {}

    def reserve(self, name: str) -> None:
        """Raises `InvalidRequestError` for what is no name, for one in use, and where there are too many."""
        check_name(name, "name", self._limits)
        if name in self._tokens:
            raise InvalidRequestError(f"a prefix named {name!r} is pinned already; unpin it first", "name")
        self._limits.check("pinned_prefixes", len(self._tokens) + 1, "name")
        self._tokens[name] = None

    def complete(self, name: str, num_tokens: int) -> int:
        """Returns `num_tokens`."""
        self._tokens[name] = num_tokens
        return num_tokens

    def release(self, name: str) -> None:
        """It did not come to be pinned."""
        self._tokens.pop(name, None)

    def remove(self, name: str) -> None:
        """Raises `InvalidRequestError` for a name that is not pinned, or not yet."""
        if name not in self._tokens:
            known = ", ".join(self._tokens) or "none"
            raise InvalidRequestError(f"no prefix named {name!r} is pinned; pinned: {known}", "name")
        if self._tokens[name] is None:
            raise InvalidRequestError(f"the prefix {name!r} is being computed: unpin it when it is pinned", "name")
        del self._tokens[name]

    def list(self) -> dict[str, int]:
        """Those that are pinned, with their numbers of tokens."""
        return {name: tokens for name, tokens in self._tokens.items() if tokens is not None}
