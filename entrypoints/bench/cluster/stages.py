"""A replica's stages on the virtual clock: each has a machine of its own, and some of the layers."""

from __future__ import annotations

import msgspec

from engine.models.spec import DecoderSpec, layer_weights
from engine.models.stages import Stage, layers_of
from engine.reports import LoadReport
from entrypoints.bench.cluster.costs import StepCosts, StepWork


class Stages(msgspec.Struct, frozen=True):
    shares: tuple[float, ...] = (1.0,)
    """of what the layers take"""
    hop_s: float = 0.0
    """from a stage to the next one that has a step, and from the last one's tokens to the first stage"""

    def seconds(self, costs: StepCosts, work: StepWork) -> list[float]:
        """Of each stage; the last one has the unembedding."""
        layers, sampled = costs.seconds_of_layers(work), costs.seconds_of_sampled(work)
        last = len(self.shares) - 1
        return [layers * share + (sampled if index == last else 0.0) for index, share in enumerate(self.shares)]

    def report(self, of_all: LoadReport) -> LoadReport:
        """What one machine holds: of the stage that has most."""
        most = max(self.shares)
        changes = {name: round(getattr(of_all, name) * most) for name in ("weight_bytes", "block_bytes")}
        return msgspec.structs.replace(of_all, **changes)


def stages_of(spec: DecoderSpec | None, count: int, hop_s: float = 0.0) -> Stages:
    """As the engine divides the layers (`engine.models.stages`)."""
    if spec is None or count == 1:
        return Stages()
    weights = [layer_weights(spec, layer) for layer in spec.layers]
    spans = [layers_of(spec, Stage(index, count)) for index in range(count)]
    return Stages(tuple(sum(weights[span.first : span.end]) / sum(weights) for span in spans), hop_s)
