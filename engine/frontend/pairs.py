"""Two texts as one prompt, for models that read both at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.frontend.admission import PairPrompt
from engine.frontend.tokenizer import Tokenizer
from engine.models.facts import ModelFacts

if TYPE_CHECKING:
    import tokenizers


def pair_prompt(
    tokenizer: Tokenizer,
    model: ModelFacts,
    config: EngineConfig,
    one: str,
    other: str,
    most: int | None = None,
    most_of_other: int | None = None,
    fields: tuple[str, str] = ("data_1", "data_2"),
) -> PairPrompt:
    """As `encode_pair`; a token of the second text, where the model tells them apart, is of the second kind. `most`: as
    `PoolingParams.truncate_prompt_tokens`. Raises `InvalidRequestError` naming one of `fields` for a text that is too
    long to be looked at."""
    bound, cut = tokenizer.bound, (most is not None, most is not None or most_of_other is not None)
    one, other = (
        bound.cut(text, field) if cuts else bound.check(text, field, generates=False)
        for text, field, cuts in zip((one, other), fields, cut, strict=True)
    )
    length = config.model.max_model_len if most == -1 else most
    ids, kinds = encode_pair(tokenizer.backend, one, other, length, most_of_other)
    size, last = model.vocab_size, model.token_types - 1 if tokenizer.tells_texts_apart else 0
    return PairPrompt([token + size * min(kind, last) for token, kind in zip(ids, kinds, strict=True)])


def encode_pair(
    tokenizer: tokenizers.Tokenizer, one: str, other: str, most: int | None = None, most_of_other: int | None = None
) -> tuple[list[int], list[int]]:
    """Token ids, and which of the two each belongs to (0 or 1), with the marks around them as the tokenizer says.
    `other` is cut to `most_of_other` tokens, then the longer one until all are at most `most`. Lets go of the
    interpreter lock while it works."""
    first, second = tokenizer.encode_batch([one, other], add_special_tokens=False)
    if most_of_other is not None and len(second) > most_of_other:
        second.truncate(most_of_other)
    if most is not None:
        marks = tokenizer.num_special_tokens_to_add(True)
        for encoding, length in zip((first, second), _shares(len(first), len(second), most - marks), strict=True):
            encoding.truncate(length)
    joined = tokenizer.post_process(first, second, True)
    return joined.ids, joined.type_ids


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Of two lengths that are at most `room` together: the shorter keeps what it has up to half of it."""
    room = max(room, 0)
    if first + second <= room:
        return first, second
    if min(first, second) > room // 2:
        half = room // 2
        return (half, room - half) if second >= first else (room - half, half)
    return (first, room - first) if first < second else (room - second, second)
