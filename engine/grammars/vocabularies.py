"""A model's vocabulary, as the libraries want it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from engine.errors import InvalidRequestError
from engine.grammars.language import FIELD

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer
    from xgrammar import TokenizerInfo


class ModelVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    tokenizer: str
    """tokenizers' JSON"""
    eos_token_ids: list[int]
    vocab_size: int
    """of the model; its tokenizer may have more"""

    def for_llguidance(self) -> LLTokenizer:
        """Takes a second for 256k tokens, in which no other thread runs Python. Raises `InvalidRequestError`, and what
        the library raises, panics included."""
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        eos = self._eos()
        own = Tokenizer.from_str(self.tokenizer).get_vocab_size(with_added_tokens=True)
        return LLTokenizer(self.tokenizer, n_vocab=max(own, self.vocab_size), eos_token=eos)

    def for_xgrammar(self) -> TokenizerInfo:
        """Special tokens are no text that a grammar could ask for. Raises `InvalidRequestError`."""
        from tokenizers import Tokenizer
        from xgrammar import TokenizerInfo

        eos = self._eos()
        tokenizer = Tokenizer.from_str(self.tokenizer)
        found = TokenizerInfo._detect_metadata_from_hf(self.tokenizer)
        special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        entries = [""] * self.vocab_size
        for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
            if token < self.vocab_size and token not in special:
                entries[token] = text
        return TokenizerInfo(
            entries,
            found["vocab_type"],
            vocab_size=self.vocab_size,
            stop_token_ids=eos,
            add_prefix_space=found["add_prefix_space"],
        )

    def _eos(self) -> list[int]:
        eos = [token for token in self.eos_token_ids if 0 <= token < self.vocab_size]
        if not self.tokenizer.startswith("{") or not eos:  # anything else would be the name of a file
            raise InvalidRequestError("this model's tokenizer, or its EOS, is not known", FIELD)
        return eos


def check_decoder(tokenizer: Tokenizer) -> None:
    """Raises `InvalidRequestError` where nobody says which bytes each token is: llguidance reads it off the decoder."""
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    kinds = [decoder.get("type"), *(each.get("type") for each in decoder.get("decoders", ()))]
    if "ByteLevel" not in kinds[:1] and "ByteFallback" not in kinds[1:]:
        raise InvalidRequestError(
            f"{FIELD}: this model's tokenizer cannot be followed: its decoder ({kinds[0]}) knows no bytes", FIELD
        )
