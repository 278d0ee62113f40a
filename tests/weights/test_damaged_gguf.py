"""A damaged GGUF file is refused with a WeightsError that names it, never read past its end."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError, EngineError, UnsupportedModelError, WeightsError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.gguf_header import ArrayLength, read_gguf_header
from engine.weights.loader import load_weights

HIDDEN, INNER, VOCAB = 32, 64, 40
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (16, HIDDEN),
    "blk.0.attn_v.weight": (16, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}


def write(path: Path, shapes: dict[str, tuple[int, ...]] = SHAPES, architecture: str = "llama", parts: int = 1) -> Path:
    writer = GGUFWriter(str(path), architecture)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{index}" for index in range(1500)])
    writer.add_token_scores([0.5] * 1500)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) > 1:
            encoding = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(values, encoding), raw_dtype=encoding)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> Decoder:
    description = describe(str(path))
    model = Decoder(description.spec, dtype=torch.float32)
    load_weights(model, description)
    return model


def test_the_undamaged_file_loads_and_long_arrays_are_only_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    header = read_gguf_header(path)
    assert header.metadata["tokenizer.ggml.tokens"] == ArrayLength(1500)
    assert header.metadata["tokenizer.ggml.scores"] == ArrayLength(1500)
    assert header.metadata["llama.embedding_length"] == HIDDEN
    assert describe(str(path)).generation_defaults == {"temperature": 0.5, "top_k": 40}
    assert all(parameter.isfinite().all() for parameter in load(path).parameters())


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    last = read_gguf_header(tmp_path / "m.gguf").tensors["blk.0.ffn_down.weight"]
    end = last.offset + last.size_bytes
    cut = tmp_path / "cut.gguf"
    for size in [*range(200), *range(200, end, 997), end - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            describe(str(cut))


@given(at=st.integers(-1200, 900), value=st.integers(0, 255))
def test_a_changed_byte_never_escapes_as_another_exception(at: int, value: int, tmp_path: Path) -> None:
    """In the metadata, or (negative) in the tensor table, which ends where the first tensor begins."""
    path = tmp_path / "m.gguf"
    content = bytearray(path.read_bytes() if path.exists() else write(path).read_bytes())
    if at < 0:
        at += content.index(b"token_embd.weight") + 1150
    content[at] = value
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(bytes(content))
    try:
        read_gguf_header(changed)
        description = describe(str(changed))
        facts = description.facts
        sizes = (
            facts.max_position,
            facts.intermediate_size,
            facts.hidden_size,
            facts.layers[0].num_heads,
            facts.layers[0].num_kv_heads,
            facts.layers[0].head_dim,
        )
        if max(sizes) < 3000:  # a larger model would only be refused after its memory was taken
            load(changed)
    except EngineError as error:
        assert str(error)


@pytest.mark.parametrize(("offset", "says"), [(1 << 40, "file ends"), (33, "no multiple of 32")])
def test_an_offset_beyond_the_file_or_between_places_is_refused_naming_the_tensor(
    tmp_path: Path, offset: int, says: str
) -> None:
    path = write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    name = b"blk.0.attn_v.weight"
    after_name = content.index(name) + len(name)
    num_dims = struct.unpack_from("<I", content, after_name)[0]
    offset_at = after_name + 4 + 8 * num_dims + 4
    struct.pack_into("<Q", content, offset_at, offset)
    path.write_bytes(bytes(content))
    with pytest.raises(WeightsError, match=rf"blk\.0\.attn_v\.weight.*{says}"):
        describe(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2**32 - 1),
        ("llama.embedding_length", 0),
        ("llama.embedding_length", 10**9),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 10**9),
        ("llama.context_length", 2**31),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
    ],
)
def test_absurd_metadata_is_refused_by_its_key(key: str, value: float, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    at = content.index(key.encode()) + len(key) + 4
    struct.pack_into("<f" if isinstance(value, float) else "<I", content, at, value)
    path.write_bytes(bytes(content))
    with pytest.raises(WeightsError, match=rf"m\.gguf: metadata {key} must be"):
        describe(str(path))


@pytest.mark.parametrize(("at", "what"), [(8, "tensor count"), (16, "metadata count"), (24, "a metadata key: length")])
def test_absurd_counts_are_refused_before_they_are_counted(at: int, what: str, tmp_path: Path) -> None:
    """The file is as large as what they promise, but sparse."""
    path = write(tmp_path / "m.gguf")
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(struct.pack("<Q", 2**27))
        file.truncate(2**28)
    with pytest.raises(WeightsError, match=rf"m\.gguf: damaged.*{what}"):
        describe(str(path))


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    content, one, other = path.read_bytes(), b"tokenizer.ggml.tokens", b"tokenizer.ggml.scores"
    path.write_bytes(content.replace(other, one))
    with pytest.raises(WeightsError, match=r"m\.gguf: .*tokenizer\.ggml\.tokens' stands there twice"):
        describe(str(path))


def test_names_of_a_file_stay_short_and_on_a_line_in_messages(tmp_path: Path) -> None:
    for name in (b"k" * (1 << 20), b"a\n\x1b[31mred"):
        key = struct.pack("<Q", len(name)) + name
        for content in (
            struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 77),
            struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 9),
            struct.pack("<QQ", 1, 0) + key + struct.pack("<IQIQ", 1, 1 << 40, 0, 0),
        ):
            path = tmp_path / "m.gguf"
            path.write_bytes(b"GGUF" + struct.pack("<I", 3) + content)
            with pytest.raises(WeightsError) as refusal:
                describe(str(path))
            assert len(str(refusal.value)) < 500 and str(refusal.value).isprintable()


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    without = {name: shape for name, shape in SHAPES.items() if name != "blk.0.attn_v.weight"}
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.self_attn\.v_proj\.weight is missing from .*m\.gguf"):
        load(write(tmp_path / "m.gguf", without))
    with pytest.raises(WeightsError, match=r"extra\.gguf.*blk\.0\.attn_sinks\.weight is not part of a llama model"):
        load(write(tmp_path / "extra.gguf", {**SHAPES, "blk.0.attn_sinks.weight": (4,)}))
    with pytest.raises(WeightsError, match=r"k_proj\.weight has shape \(32, 32\), expected \(16, 32\)"):
        load(write(tmp_path / "shape.gguf", {**SHAPES, "blk.0.attn_k.weight": (32, 32)}))


def test_other_architectures_parts_and_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3"):
        describe(str(write(tmp_path / "g.gguf", architecture="mamba")))
    with pytest.raises(WeightsError, match="split model"):
        describe(str(write(tmp_path / "s.gguf", parts=2)))
    (tmp_path / "no.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(WeightsError, match="not a GGUF file"):
        describe(str(tmp_path / "no.gguf"))
    with pytest.raises(ConfigError):
        describe(str(tmp_path / "absent.gguf"))
