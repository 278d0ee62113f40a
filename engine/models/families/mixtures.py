"""What families with experts share: typed reading of their numbers, and layers that have them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.common import Config, activation_of, flag, integer, num_layers, number
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, RouterSpec


def from_zero(config: Config, key: str, default: int) -> int:
    """An integer of at least 0; `default` where the key is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    return 0 if value == 0 and not isinstance(value, bool) else integer(config, key)


def sigmoid_router(config: Config) -> RouterSpec:
    """DeepSeek-V3's, as GLM-4.5 and dots.llm1 have it."""
    return RouterSpec(
        kind="sigmoid",
        top_k=integer(config, "num_experts_per_tok"),
        normalise=flag(config, "norm_topk_prob", True),
        correction=True,
        groups=integer(config, "n_group", 1),
        top_groups=integer(config, "topk_group", 1),
        scale=number(config, "routed_scaling_factor", 1.0),
        wide=True,
    )


def experts_spec(config: Config, router: RouterSpec, count: str, inner: str = "moe_intermediate_size") -> ExpertsSpec:
    """`count`, `inner`: the config's keys."""
    return ExpertsSpec(
        count=integer(config, count),
        inner_size=integer(config, inner),
        router=router,
        activation=activation_of(config, "hidden_act", "silu"),
    )


def with_deepseek_experts(spec: DecoderSpec, config: Config, router: RouterSpec, sparse: Sequence[bool]) -> DecoderSpec:
    """Of the layers that `sparse` names, with a dense MLP of `n_shared_experts` times their size beside them. Raises
    what `with_experts` does."""
    experts = experts_spec(config, router, "n_routed_experts")
    return with_experts(spec, experts, sparse, experts.inner_size * integer(config, "n_shared_experts"))


def first_dense(config: Config, default: int) -> list[bool]:
    """Which layers have experts: all behind `first_k_dense_replace`, or `default` where the config does not say."""
    dense = from_zero(config, "first_k_dense_replace", default)
    return [layer >= dense for layer in range(num_layers(config))]


def named_sparse(config: Config, default: int) -> list[bool]:
    """By `mlp_layer_types`, or else as `first_dense`."""
    kinds, count = config.get("mlp_layer_types"), num_layers(config)
    if kinds is None:
        return first_dense(config, default)
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types must name dense or sparse for {count} layers, found {shown(kinds)}")
    return [kind == "sparse" for kind in kinds]


def sparse_layers(config: Config) -> list[bool]:
    """Qwen's rule: every `decoder_sparse_step`th layer, but for `mlp_only_layers`."""
    step, dense = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ConfigError(f"mlp_only_layers must be a list of layers, found {shown(dense)}")
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(num_layers(config))]


def listed_layers(config: Config) -> list[bool]:
    """Llama 4's rule: `moe_layers`, or else every `interleave_moe_layer_step`th layer."""
    count, listed = num_layers(config), config.get("moe_layers")
    if listed is None:
        step = integer(config, "interleave_moe_layer_step", 1)
        return [(layer + 1) % step == 0 for layer in range(count)]
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise ConfigError(f"moe_layers must be a list of layers, found {shown(listed)}")
    return [layer in listed for layer in range(count)]


def with_experts(
    spec: DecoderSpec, experts: ExpertsSpec, sparse: Sequence[bool] | None = None, beside: int = 0
) -> DecoderSpec:
    """`spec` with experts in the layers that `sparse` names (None: in all), and beside them a dense MLP of `beside`
    inner values, where that is not 0; the other layers keep theirs. Raises ConfigError, UnsupportedModelError."""
    router, count = experts.router, experts.count
    if router.of_inputs and router.top_k != 1:
        raise UnsupportedModelError(f"num_experts_per_tok {router.top_k} is not supported: rows have one factor")
    if router.top_k > count:
        raise ConfigError(f"num_experts_per_tok is {router.top_k}, of {count} experts")
    in_groups = count // router.groups * router.top_groups
    if count % router.groups or router.top_groups > router.groups or in_groups < router.top_k:
        raise ConfigError(
            f"n_group {router.groups} and topk_group {router.top_groups} leave no {router.top_k} of {count} experts"
        )

    beside_activation = experts.activation if isinstance(experts.activation, str) else "silu"

    def mixed(layer: LayerSpec) -> LayerSpec:
        dense = None
        if beside:
            dense = MlpSpec(intermediate_size=beside, activation=beside_activation, gated=experts.gated)
        return replace(layer, mlp=dense, experts=experts)

    has_experts = sparse or [True] * spec.num_layers
    layers = (mixed(layer) if its else layer for layer, its in zip(spec.layers, has_experts, strict=True))
    return replace(spec, layers=tuple(layers))
