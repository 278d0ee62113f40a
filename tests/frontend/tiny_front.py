"""A tiny model directory without weights: a byte-level BPE tokenizer with a chat template, and a Llama config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.config import EngineConfig
from engine.core.wire import SequenceDelta
from engine.frontend.admission import Admission, AdmittedRequest
from engine.frontend.tokenizer import Tokenizer as FrontTokenizer
from engine.machine import Machine
from engine.models.description import describe
from engine.request import SamplingParams
from engine.resolve import EngineArgs, resolve

MAX_POSITION = 256
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('role forbidden') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "stop words and other words, 你好 wörld 😀 😀 é",
    "hello hello world",
]
MACHINE = Machine(physical_cores=4, memory_bytes=2**34, home="/home/user", working_directory="/data")


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[AddedToken("<s>", special=True), AddedToken("</s>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """SentencePiece's conventions: a visible space mark, bytes for what the vocabulary lacks, first space stripped."""
    words = ["\u2581", "\u2581hello", "\u2581world", "lo", "h", "e", "w", "d", ",", "\u2581a"]
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def save_model(path: Path, *, chat_template: str | None = TEMPLATE, vocab_size: int = 340) -> Path:
    """A directory that `describe` and `Tokenizer.load` accept. The vocabulary is padded past the tokenizer's."""
    from transformers import PreTrainedTokenizerFast

    path.mkdir(parents=True, exist_ok=True)
    hf = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), bos_token="<s>", eos_token="</s>")
    hf.chat_template = chat_template
    hf.save_pretrained(path)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7, "eos_token_id": 1}))
    return path


def config_of(path: Path, **settings: Any) -> EngineConfig:
    return resolve(EngineArgs(model=str(path), device="cpu", **settings), describe(str(path)), MACHINE)


class Front:
    """Tokenizer and admission of one tiny model."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.config = config_of(path, **settings)
        self.tokenizer = FrontTokenizer.load(str(path))
        self.admission = Admission(self.config, self.tokenizer)

    def admit(self, prompt: str, request_id: str = "r", **params: Any) -> AdmittedRequest:
        return self.admission.admit(
            request_id,
            prompt,
            self.tokenizer.encode(prompt),
            SamplingParams(**params),
        )


def deltas(core_id: str, token_ids: list[int], **last: Any) -> list[SequenceDelta]:
    """One delta a token; `last` goes to the final one."""
    cut = len(token_ids) - 1
    return [
        SequenceDelta(request_id=core_id, token_ids=[t], **(last if i == cut else {})) for i, t in enumerate(token_ids)
    ]
