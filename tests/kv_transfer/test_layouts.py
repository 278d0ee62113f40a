"""What keeps two engines from each other's pages: settings that change what the bytes mean."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "models"))
from tiny_models import make_model

from engine.config import EngineArgs
from engine.core.wire import CoreReady
from engine.kv_transfer.layout import differences, layout_of
from engine.resolve import resolve_here
from engine.sleeping import ready_with


def layout(path: Path, longest: int, model_impl: str = "auto") -> dict[str, str]:
    args = EngineArgs(model=str(path), device="cpu", max_model_len=longest, model_impl=model_impl)  # type: ignore[arg-type]
    return layout_of(resolve_here(args)[1], "cpu", [(2, 16, 2, 8)], [None])


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_rope_that_looks_at_the_longest_sequence_is_told_by_it(model_impl: str, tmp_path: Path) -> None:
    """Else keys that were turned by short factors would be read as if by long ones."""
    make_model("phi3_long_rope").save_pretrained(tmp_path)
    short, long = layout(tmp_path, 16, model_impl), layout(tmp_path, 64, model_impl)
    assert differences(short, long) == "max_model_len 16 and 64"
    assert not differences(short, layout(tmp_path, 16, model_impl))


def test_others_may_differ_in_it(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    assert not differences(layout(tmp_path, 16), layout(tmp_path, 64))


def test_weights_that_took_others_place_are_told_of(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    config = resolve_here(EngineArgs(model=str(tmp_path), device="cpu"))[1]
    told = ready_of({"weights": "older", "block_size": "16"})
    assert ready_with(told, config).kv_layout["weights"] == layout(tmp_path, 16)["weights"] != "older"
    assert ready_with(told, config).kv_layout["block_size"] == "16"
    assert ready_with(ready_of({}), config).kv_layout == {}


def ready_of(kv_layout: dict[str, str]) -> CoreReady:
    return CoreReady(
        num_blocks=1,
        block_size=16,
        max_model_len=16,
        attention_backend="cpu",
        ledger="",
        distinct_pieces=0,
        pieces_compiled=0,
        startup_seconds=0.0,
        kv_layout=kv_layout,
    )
