"""What the rest of the core knows of grammars: a position in one, and where such positions come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """How far one output has come in its grammar."""

    def advance(self, token: int) -> None:
        """The output's next token. Raises `InvalidRequestError` where the grammar does not allow it."""
        ...

    @property
    def is_over(self) -> bool:
        """Nothing can follow: the output is complete."""
        ...

    def forced(self) -> list[int]:
        """Tokens that are likely to come next, because all that is allowed begins as their text does."""
        ...

    def copy(self) -> Matcher:
        """The same position, which goes on by itself."""
        ...


class Grammars(Protocol):
    """Compiled grammars by their text."""

    def begin(self, grammar: str) -> bool:
        """Compile it unless it is at hand. Returns whether `start` may be called now; else the core is told when."""
        ...

    def start(self, grammar: str) -> Matcher:
        """The position where every output begins. Raises `InvalidRequestError` for what did not compile."""
        ...

    def fill(
        self, matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]] = ()
    ) -> tuple[np.ndarray, dict[int, str]]:
        """What may come next, and behind each of a matcher's `drafts` (`()`: none have any): int32 [sum of 1 + drafts,
        words of 32 tokens], the lowest bit is the first token; everything for None, and behind a draft that is not
        allowed. And why, for those that cannot tell, by their index: everything is allowed them, too."""
        ...
