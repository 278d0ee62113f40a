"""What a model's own head for multi-token prediction is, read from the model's config. Torch-free."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from engine.errors import UnsupportedModelError
from engine.models.description import ModelDescription
from engine.models.facts import HeadsSpec
from engine.models.families.registry import family_named
from engine.models.families.rows import Rows
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec

_WHERE = "speculative_config: method 'mtp'"


class MtpSpec(msgspec.Struct, frozen=True, kw_only=True):
    target: ModelDescription
    """in whose checkpoint it is"""
    layer: DecoderSpec
    """its one layer, and a final norm; the tables are the target's"""

    def rows(self) -> list[dict[str, Rows]]:
        """See `MtpNames.rows`."""
        assert self.target.spec is not None
        names = family_named(self.target.spec.family).mtp
        assert names is not None
        return names.rows(self.layer, self.target.spec.num_layers)


def mtp_spec(target: ModelDescription) -> MtpSpec:
    """Such a layer is as the model's last one that attends. Raises UnsupportedModelError."""
    family = None if target.spec is None else family_named(target.spec.family)
    if target.source == "gguf":
        raise UnsupportedModelError(f"{_WHERE}: heads in GGUF files are not read; use a directory, or method 'ngram'")
    if target.spec is None or family is None or family.mtp is None:
        raise UnsupportedModelError(f"{_WHERE}: no heads of {target.facts.family} are known; use method 'ngram'")
    count = target.hf_config.get(family.mtp.count, 1)
    if count != 1:
        raise UnsupportedModelError(
            f"{_WHERE}: {target.path}: {family.mtp.count} is {shown(count)}: a head of one layer is supported; use "
            "method 'ngram'"
        )
    *_, last = (layer for layer in target.spec.layers if isinstance(layer.mixer, HeadsSpec))
    layer = replace(target.spec, layers=(last,), begins=False, ends=False, tie_embeddings=False, head=None)
    return MtpSpec(target=target, layer=layer)
