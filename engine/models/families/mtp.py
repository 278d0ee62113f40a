"""How families' checkpoints hold a layer behind the model's own that predicts a further token, and what leads into it
(multi-token prediction: DeepSeek-V3, 2024, section 2.2)."""

from __future__ import annotations

import msgspec

from engine.models.families.names import Names
from engine.models.families.rows import Rows
from engine.models.spec import DecoderSpec


class MtpNames(msgspec.Struct, frozen=True, kw_only=True):
    """Qwen's; `{}` is the number of the model's layers. Copies of the model's tables beside them are not read."""

    count: str
    """the config's key for how many such layers there are"""
    layer: str = "mtp.layers.0"
    fc: str = "mtp.fc"
    next_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    final_norm: str = "mtp.norm"
    names: tuple[Names, ...]
    """within the layer: one of these"""

    def rows(self, spec: DecoderSpec, behind: int) -> list[dict[str, Rows]]:
        """Checkpoint name → place in `engine.models.mtp.MtpHead`, in each of the ways that there are. `spec`: of the
        one layer; `behind`: how many layers of the model are before it."""
        hidden, found = spec.hidden_size, []
        for names in self.names:
            rows = {f"{self.fc}.weight": Rows("fc.weight", 0, hidden)}
            for source, target in (
                (self.next_norm, "next_norm"),
                (self.hidden_norm, "hidden_norm"),
                (self.final_norm, "norm"),
            ):
                rows[f"{source}.weight"] = Rows(f"{target}.weight", 0, hidden, names.norms_stored)
            rows |= names.layer_rows(spec, 0, self.layer, "layers.0")
            found.append({name.replace("{}", str(behind)): row for name, row in rows.items()})
        return found
