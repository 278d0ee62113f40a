"""Where a tokenizer comes from: transformers knows how to make one of any checkpoint, but is slow and large.

Its import takes seconds and brings torch along (400 MiB); a GGUF file takes seconds more. What comes out
is small: the JSON of a `tokenizers.Tokenizer`, a template, a few tokens. So it is made once, in a process of its own,
and kept in the cache directory under the identity of the files that it came from.

What is kept is two lines: that identity and the content's SHA-256, and the content. An entry that does not verify does
not exist, nor does one in a directory that somebody else may write.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from compilation.directory import trusted_directory
from compilation.errors import CompileError
from engine.errors import ConfigError
from engine.models.bounds import CONFIG_BYTES, TOKENIZER_BYTES
from engine.models.json_file import read_json_object

if TYPE_CHECKING:
    import tokenizers
    import transformers

logger = logging.getLogger(__name__)

FORMAT = 5
"""of a kept description; raise it when its meaning changes"""
_FOLDER = "tokenizers"
_CONVERT_TIMEOUT_S = 300
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""of a model's directory, what no tokenizer is made of"""
_HASHED_BYTES = 64 * 2**20
"""of a file: a tenth of a second"""
_BOUNDED = (".json", ".txt", ".jinja", ".model")
"""what one is made of, and what is read whole"""

# As the core's: the child imports from where the parent does, and not from the user's directory (-P).
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.frontend.tokenizer_source import convert_main; sys.exit(convert_main(sys.argv[2]))"
)


class TokenizerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """All that the front end needs of a tokenizer."""

    backend: str
    """JSON of a `tokenizers.Tokenizer`, without truncation and padding"""
    vocab_size: int
    eos_token_id: int | None
    special_tokens: dict[str, str | list[str]]
    """by transformers' names ("bos_token", …): variables of the chat template"""
    chat_template: str | dict[str, str] | None
    """one, or several by name"""
    tells_texts_apart: bool = False
    """models are told which of two texts each token is of"""
    response_template: dict[str, Any] | None = None
    """how answers are read, where the checkpoint says so"""

    @classmethod
    def bare(
        cls, backend: tokenizers.Tokenizer, vocab_size: int, eos_token_id: int | None, marks: Collection[str]
    ) -> TokenizerDescription:
        """Without templates; `marks` are special tokens in it."""
        described = msgspec.json.decode(backend.to_str())
        for token in described["added_tokens"]:
            token["special"] |= token["content"] in marks
        return cls(
            backend=msgspec.json.encode(described).decode(),
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            special_tokens={},
            chat_template=None,
        )


def describe_tokenizer(path: str, cache_dir: Path | None) -> TokenizerDescription:
    """Of a Hugging Face directory or a GGUF file; from the cache if it is there, else made (seconds) and kept.

    Without `cache_dir` it is made in this process, and nothing is kept. Raises `ConfigError`.
    """
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise ConfigError(f"tokenizer {path!r} is neither a directory nor a GGUF file")
    key = _identity(path)
    if cache_dir is None:
        return _description_of(load_with_transformers(path), _lowers(path))
    folder = _trusted_folder(cache_dir)
    kept = None if folder is None else folder / f"{key[:32]}.jsonl"
    known = None if kept is None else _read(kept, key)
    if known is None:
        text = _convert(path)
        known = msgspec.json.decode(text, type=TokenizerDescription)
        if kept is not None:
            _keep(kept, key, text)
    return known


def load_with_transformers(path: str) -> transformers.PreTrainedTokenizerBase:
    """transformers' own object for the same path. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    try:
        if os.path.isfile(path):
            return _of_gguf(*os.path.split(path))
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of several libraries about anybody's files; `tokenizers` panics beside Exception
        raise _refusal(path, error) from error


def _of_gguf(directory: str, file: str) -> transformers.PreTrainedTokenizerBase:
    """The library asks for a config first, and knows few architectures; most files need none for their tokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(directory, gguf_file=file, local_files_only=True)
    except ValueError as error:
        if "is not supported yet" not in str(error):
            raise
    return PreTrainedTokenizerFast.from_pretrained(directory, gguf_file=file, local_files_only=True)


def _refusal(path: str, error: BaseException) -> ConfigError:
    reason = " ".join(str(error).split())[:500] or type(error).__name__
    return ConfigError(f"no tokenizer can be loaded from {path!r} (setting `tokenizer`): {reason}")


def convert_main(path: str) -> int:
    """The child: the description of `path` to standard output, or the reason why there is none, and status 1."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no part of the answer
    try:
        if os.path.isfile(path):
            _read_gguf_quickly()
        answer, status = msgspec.json.encode(_checked(path)), 0
    except ConfigError as error:
        answer, status = str(error).encode(), 1
    with os.fdopen(out, "wb") as file:
        file.write(answer)
        file.flush()
    os._exit(status)  # the answer is out; taking torch down takes time


def _checked(path: str) -> TokenizerDescription:
    """What is kept was read back once."""
    import tokenizers

    description = _description_of(load_with_transformers(path), _lowers(path))
    try:
        tokenizers.Tokenizer.from_str(description.backend)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise _refusal(path, error) from error
    return description


def _read_gguf_quickly() -> None:
    """For a process that does nothing else: gguf's reader takes views of its file by the million, one for each part of
    each token, and views of a `memmap` cost three times those of an array."""
    import numpy

    mapped = numpy.memmap

    def as_array(*args: Any, **kwargs: Any) -> numpy.ndarray[Any, Any]:
        return numpy.asarray(mapped(*args, **kwargs))

    setattr(numpy, "memmap", as_array)  # noqa: B010 (no assignment to a class in mypy's eyes)


def _lowers(path: str) -> bool:
    """Whether sentence-transformers' files have it lower-case every text first. Raises `ConfigError`."""
    folder = Path(path)
    files = folder.glob("sentence_*_config.json") if (folder / "modules.json").is_file() else ()
    return any(read_json_object(file, CONFIG_BYTES).get("do_lower_case") is True for file in files)


def _description_of(hf: transformers.PreTrainedTokenizerBase, lowers: bool) -> TokenizerDescription:
    if not getattr(hf, "is_fast", False):
        raise ConfigError(
            f"the tokenizer {type(hf).__name__} has no `tokenizers` form; save it as tokenizer.json "
            "(AutoTokenizer.from_pretrained(path).save_pretrained(path)) and name that directory as `tokenizer`"
        )
    backend = hf.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if lowers:
        from tokenizers import normalizers

        after = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *after])
    return TokenizerDescription(
        backend=backend.to_str(),
        vocab_size=len(hf),
        eos_token_id=hf.eos_token_id,
        special_tokens={
            name: [str(token) for token in value] if isinstance(value, (list, tuple)) else str(value)
            for name, value in hf.special_tokens_map.items()
        },
        chat_template=hf.chat_template or None,
        tells_texts_apart="token_type_ids" in hf.model_input_names,
        response_template=getattr(hf, "response_template", None) or None,
    )


def _convert(path: str) -> bytes:
    """In a child, so that this process keeps neither transformers nor torch."""
    logger.info("converting the tokenizer of %s (kept for later starts)", path)
    command = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), path]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CONVERT_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the tokenizer of {path!r} took more than {_CONVERT_TIMEOUT_S} s to convert") from error
    if done.returncode == 0:
        return done.stdout
    reason = done.stdout.decode(errors="replace") or done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise ConfigError(reason or f"converting the tokenizer of {path!r} ended with status {done.returncode}")


def _identity(path: str) -> str:
    """Changes with what the files hold, wherever they lie (a large one's place, size and time of change stand for it),
    and with the libraries that read them. Raises `ConfigError` for a file that no tokenizer has."""
    place = os.path.realpath(path)
    if os.path.isfile(place):
        files = [place]
    else:
        folders = [place, os.path.join(place, "additional_chat_templates")]
        entries = [entry for folder in folders if os.path.isdir(folder) for entry in os.scandir(folder)]
        files = sorted(e.path for e in entries if e.is_file() and not e.name.endswith(_WEIGHTS))
    facts: list[object] = [FORMAT, version("transformers"), version("tokenizers")]
    for file in files:
        status = os.stat(file)
        if status.st_size > TOKENIZER_BYTES and file.endswith(_BOUNDED):
            raise ConfigError(f"{file}: has {status.st_size} bytes; at most {TOKENIZER_BYTES} are read of such a file")
        content = _small(file, status.st_size)
        if content is None:
            facts.append((file, status.st_size, status.st_mtime_ns, status.st_ino))
        else:
            facts.append((os.path.relpath(file, place), hashlib.sha256(content).hexdigest()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _small(file: str, size: int) -> bytes | None:
    """What is in the file; None where that is much, or nobody's business."""
    try:
        return Path(file).read_bytes() if size <= _HASHED_BYTES else None
    except OSError:
        return None


class _Seal(msgspec.Struct, frozen=True):
    """The first line of an entry."""

    key: str
    sha256: str


def _trusted_folder(cache_dir: Path) -> Path | None:
    """Where entries are, made for this user only; None where there can be none, or where others may write: what a
    tokenizer makes of a text is in their hands then."""
    try:
        return trusted_directory(trusted_directory(cache_dir) / _FOLDER)
    except CompileError as error:
        logger.warning("the converted tokenizer cannot be kept, and is made at every start: %s", error)
        return None


def _read(file: Path, key: str) -> TokenizerDescription | None:
    """None: never kept, cut off by a full disk, damaged, or another's: it is made again."""
    try:
        first, _, content = file.read_bytes().partition(b"\n")
        seal = msgspec.json.decode(first, type=_Seal)
        if seal != _Seal(key, hashlib.sha256(content).hexdigest()):
            raise ValueError("its seal is of another content")
        return msgspec.json.decode(content, type=TokenizerDescription)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("the kept tokenizer %s does not verify (%s) and is made again", file, error)
        return None


def _keep(file: Path, key: str, content: bytes) -> None:
    """Readers see a whole file or none. A cache that cannot be written only costs the next start its time."""
    seal = _Seal(key, hashlib.sha256(content).hexdigest())
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem)
        try:
            with os.fdopen(handle, "wb") as new:
                new.write(msgspec.json.encode(seal) + b"\n" + content)
            os.replace(name, file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning("the converted tokenizer cannot be kept in %s: %s", file.parent, error)
