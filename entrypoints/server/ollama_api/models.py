"""What Ollama's routes tell of the model that is served."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engine.models.description import ModelDescription
from engine.models.gguf_header import read_gguf_header
from entrypoints.server.context import ServerContext
from entrypoints.server.names import tagged

_NEVER = "9999-12-31T23:59:59Z"
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


class Details(msgspec.Struct):
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int
    parent_model: str = ""


class Listed(msgspec.Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]


class Running(msgspec.Struct):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    size_vram: int
    context_length: int
    expires_at: str = _NEVER


class ListedModels(msgspec.Struct):
    models: list[Listed]


class RunningModels(msgspec.Struct):
    models: list[Running]


class Shown(msgspec.Struct):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str
    license: str = ""


class Files(msgspec.Struct, frozen=True):
    """Of the weights: bytes, and when the last of them was written."""

    size: int
    modified: float
    quantization: str | None
    """as a GGUF file says"""


class Models:
    """One model under all its names. Sizes are of the weights as they are stored; `parameter_count` leaves out norms
    and biases. `digest` is of what names and makes the model, not of its bytes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._model: ModelDescription = context.engine.model
        self._files: Files | None = None

    async def listed(self) -> ListedModels:
        files = await self._read()
        modified, details, able = _time(files.modified), self._details(files), self._capabilities()
        return ListedModels(
            [
                Listed(name, name, modified, files.size, self._digest(files), details, able)
                for name in map(tagged, self._context.names)
            ]
        )

    async def running(self) -> RunningModels:
        files = await self._read()
        engine, name = self._context.engine, tagged(self._context.served_name)
        on_gpu = files.size if engine.config.device.kind == "cuda" else 0
        details, digest = self._details(files), self._digest(files)
        return RunningModels([Running(name, name, files.size, digest, details, on_gpu, engine.max_model_len)])

    async def shown(self) -> Shown:
        files = await self._read()
        facts, engine, details = self._model.facts, self._context.engine, self._details(files)
        family = details.family
        info: dict[str, str | int] = {
            "general.architecture": family,
            "general.basename": self._context.served_name,
            "general.parameter_count": facts.parameters,
            f"{family}.attention.head_count": facts.layers[0].num_heads,
            f"{family}.attention.head_count_kv": facts.layers[0].num_kv_heads,
            f"{family}.block_count": facts.num_layers,
            f"{family}.context_length": engine.max_model_len,
            f"{family}.embedding_length": facts.hidden_size,
            f"{family}.feed_forward_length": facts.intermediate_size,
            f"{family}.vocab_size": facts.vocab_size,
        }
        defaults = self._model.generation_defaults
        names = {"max_new_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
        return Shown(
            modelfile=f"FROM {self._context.served_name}\n",
            parameters="\n".join(f"{names.get(name, name):30} {value}" for name, value in defaults.items()),
            template=engine.tokenizer.chat_template_text(False),
            details=details,
            model_info=info,
            capabilities=self._capabilities(),
            modified_at=_time(files.modified),
        )

    async def _read(self) -> Files:
        if self._files is None:
            self._files = await asyncio.to_thread(_files_of, self._model)
        return self._files

    def _capabilities(self) -> list[str]:
        speech = self._context.speech
        chats = self._context.engine.tokenizer.has_chat_template
        if self._model.pooling.declared:
            return ["embedding"]
        told = {"tools": chats and speech.knows_calls, "thinking": speech.thinks, "insert": self._context.fills_in}
        return ["completion", *(name for name, able in told.items() if able)]

    def _details(self, files: Files) -> Details:
        config, facts = self._context.engine.config.model, self._model.facts
        family = str(self._model.hf_config.get("model_type") or facts.family)
        stored = files.quantization or _DTYPES[self._model.default_dtype]
        run_as = config.quantization.upper() if config.quantization in ("int8", "int4", "fp8") else stored
        form = "gguf" if self._model.source == "gguf" else "safetensors"
        size, context = _shortened(facts.parameters), self._context.engine.max_model_len
        return Details(form, family, [family], size, run_as, context, facts.hidden_size)

    def _digest(self, files: Files) -> str:
        return hashlib.sha256(repr((self._context.served_name, self._context.fingerprint, files)).encode()).hexdigest()


def _files_of(model: ModelDescription) -> Files:
    path = Path(model.path)
    quantization = None if model.quantized is None else model.quantized.method.upper()
    if model.source == "gguf":
        quantization = _file_type(read_gguf_header(path).integer("general.file_type"))
    found = [path] if path.is_file() else [path / "config.json", *path.glob("*.safetensors")]
    told = [(file.suffix, file.stat()) for file in found if file.is_file()]
    size = sum(one.st_size for suffix, one in told if suffix != ".json")
    return Files(size, max((one.st_mtime for _, one in told), default=0.0), quantization)


def _file_type(number: int | None) -> str | None:
    from gguf import LlamaFileType

    if number is None or number not in {int(each) for each in LlamaFileType}:
        return None
    return str(LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")


def _shortened(count: int) -> str:
    """As 134.52M."""
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), (1, ""))
    return f"{count / size:.4g}{unit}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
