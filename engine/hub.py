"""Models by name: what a Hugging Face hub has under it, brought here by `huggingface_hub` if it is not.

`ORG/NAME` is a repository, `ORG/NAME:QUANT` the GGUF file in it whose name says so, and `hf://ORG/NAME/FILE.gguf` that
file. Only weights in safetensors or GGUF, and text that describes them, are ever fetched: no code and no pickles.
HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to that library.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.config import EngineArgs
from engine.errors import ConfigError
from engine.machine import Machine
from engine.sizes import size_text

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NAME = re.compile(r"(?P<repo>[\w][\w.\-]*/[\w][\w.\-]*)(?::(?P<quant>[\w.\-]+))?")
_URL = re.compile(r"hf://(?P<repo>[\w][\w.\-]*/[\w][\w.\-]*)(?:@(?P<revision>[^/]+))?(?:/(?P<file>[^/]+\.gguf))?")
_PATIENCE_S = 20.0
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_TEXTS = (".json", ".jinja", "merges.txt", "vocab.txt", "tokenizer.model")
_WEIGHTS = ".safetensors"
_MODULES = re.compile(r"\d+_(Pooling/config\.json|Dense/(config\.json|model\.safetensors))")
"""how sentence-transformers calls the files below the root that are read"""
_QUANTIZED = {"int8": 0.55, "int4": 0.33, "fp8": 0.55}
"""of bfloat16's bytes, about"""


class HubName(NamedTuple):
    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str | None = None


class HubFile(NamedTuple):
    name: str
    size: int
    missing: bool
    """it is not here yet"""


def local_models(args: EngineArgs, machine: Machine) -> EngineArgs:
    """With paths in place of names, and the name that was given as the one that is served. Raises `ConfigError`."""
    name = hub_name(args.model)
    other = None if args.tokenizer is None else hub_name(args.tokenizer)
    draft = str(args.speculative_config.get("model", "")) if args.speculative_config else ""
    draft_name = hub_name(draft) if draft else None
    if name is None and other is None and draft_name is None:
        if args.revision is not None or args.download_dir is not None:
            raise ConfigError("revision and download_dir are of a model that comes from a hub; this one is a path")
        return args
    on_gpu = args.device != "cpu" and machine.cuda
    memory = machine.cuda[0].memory_bytes if on_gpu else machine.memory_bytes
    changed: dict[str, Any] = {}
    if name is not None:
        changed["model"] = _fetched(name, args, args.revision, memory, args.quantization)
        changed["served_model_name"] = args.served_model_name or args.model.removeprefix("hf://")
    if other is not None:
        changed["tokenizer"] = _fetched(other, args, None, None)
    if draft_name is not None:
        changed["speculative_config"] = {**args.speculative_config, "model": _fetched(draft_name, args, None, memory)}
    return msgspec.structs.replace(args, **changed)


def _fetched(
    name: HubName, args: EngineArgs, revision: str | None, memory_bytes: int | None, quantization: str | None = None
) -> str:
    folder = args.download_dir
    return fetched(name, revision=revision, cache_dir=folder, memory_bytes=memory_bytes, quantization=quantization)


def hub_name(model: str) -> HubName | None:
    """None for what is a path, whether something is there or not."""
    if model.startswith("hf://"):
        url = _URL.fullmatch(model)
        if url is None:
            raise ConfigError(f"model: {model[:200]!r} must read hf://ORG/NAME or hf://ORG/NAME/FILE.gguf")
        return HubName(url["repo"], None, url["file"], url["revision"])
    found = _NAME.fullmatch(model)
    if found is None or model.endswith(".gguf") or os.path.exists(model):
        return None
    return HubName(found["repo"], found["quant"])


def fetched(
    name: HubName,
    *,
    revision: str | None,
    cache_dir: str | None,
    memory_bytes: int | None,
    quantization: str | None = None,
) -> str:
    """Path of a directory or a GGUF file. `memory_bytes`: what the weights may take; more is refused before anything is
    fetched; None: only texts are fetched, as for a tokenizer. Raises `ConfigError`."""
    revision = name.revision or revision
    listed = _explained(name, lambda: _files(name.repo, revision, cache_dir))
    wanted = _wanted(name, listed, with_weights=memory_bytes is not None)
    if memory_bytes is not None:
        _check_fit(name, wanted, memory_bytes, quantization)
    _check_disk(name, wanted, cache_dir)
    place = _explained(name, lambda: _brought(name.repo, revision, cache_dir, wanted))
    only = wanted[0].name
    return os.path.join(place, only) if only.endswith(".gguf") else place


def offered(name: HubName, *, revision: str | None, cache_dir: str | None) -> list[HubFile]:
    """What `fetched` would bring of a model, the weights among it. Raises `ConfigError`."""
    listed = _explained(name, lambda: _files(name.repo, name.revision or revision, cache_dir))
    return _wanted(name, listed, with_weights=True)


def weights_of(files: Sequence[HubFile]) -> list[HubFile]:
    """Of the model itself, without layers behind it."""
    return [each for each in files if each.name.endswith((_WEIGHTS, ".gguf")) and not _MODULES.fullmatch(each.name)]


def beginning_of(name: HubName, file: HubFile, num_bytes: int, *, revision: str | None) -> bytes:
    """The first bytes of a file that is not here. Raises `ConfigError`."""
    return _explained(name, lambda: _beginning(name.repo, file.name, num_bytes, name.revision or revision))


def _beginning(repo: str, file: str, num_bytes: int, revision: str | None) -> bytes:
    from huggingface_hub import hf_hub_url

    utils: Any = import_module("huggingface_hub.utils")  # which exports its names lazily

    headers = {**utils.build_hf_headers(), "Range": f"bytes=0-{num_bytes - 1}"}
    got = bytearray()
    url = hf_hub_url(repo, file, revision=revision)
    with utils.get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_PATIENCE_S) as reply:
        utils.hf_raise_for_status(reply)
        for piece in reply.iter_bytes():
            got += piece
            if len(got) >= num_bytes:  # also of a hub that knows no ranges
                break
    return bytes(got[:num_bytes])


def free_disk(cache_dir: str | None) -> tuple[Path, int]:
    """Where models from a hub are kept, and the bytes that are free there."""
    from huggingface_hub import constants

    place = Path(cache_dir or constants.HF_HUB_CACHE)
    while not place.exists() and place != place.parent:
        place = place.parent
    return place, shutil.disk_usage(place).free


def _files(repo: str, revision: str | None, cache_dir: str | None) -> list[HubFile]:
    """Those that may be read; where no hub can be asked, of what was fetched before."""
    import huggingface_hub as library
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    _ = library.snapshot_download  # first: 2.4 prints that it imports in circles otherwise
    try:
        found = library.HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_PATIENCE_S)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:  # the network's, of an HTTP library underneath, or none is allowed
        kept = _kept(repo, revision or "main", cache_dir)
        _tell_of_no_hub(repo, type(error).__name__)
        return kept
    names = [(each.rfilename, each.size or 0) for each in found.siblings or () if _is_read(each.rfilename)]
    here = [library.try_to_load_from_cache(repo, name, cache_dir=cache_dir, revision=found.sha) for name, _ in names]
    return [HubFile(name, size, not isinstance(path, str)) for (name, size), path in zip(names, here)]


@cache
def _tell_of_no_hub(repo: str, reason: str) -> None:
    """Once, whoever asks again."""
    logger.warning("no hub can be asked for %s (%s): what was fetched before is used", repo, reason)


def _is_read(name: str) -> bool:
    return "/" not in name or _MODULES.fullmatch(name) is not None


def _kept(repo: str, revision: str, cache_dir: str | None) -> list[HubFile]:
    """Raises FileNotFoundError."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(cache_dir).repos
    except CacheNotFound as error:
        raise FileNotFoundError from error
    for each in repositories:
        for kept in each.revisions if each.repo_id == repo and each.repo_type == "model" else ():
            if revision in kept.refs or revision == kept.commit_hash:
                files = [(file.file_path.relative_to(kept.snapshot_path).as_posix(), file) for file in kept.files]
                return sorted(HubFile(name, file.size_on_disk, False) for name, file in files if _is_read(name))
    raise FileNotFoundError


def _brought(repo: str, revision: str | None, cache_dir: str | None, wanted: Sequence[HubFile]) -> str:
    from huggingface_hub import snapshot_download

    missing = [each for each in wanted if each.missing]
    if missing:
        logger.info("fetching %s: %d files, %s", repo, len(missing), size_text(sum(each.size for each in missing)))
    names = [re.sub(r"([\[?*])", r"[\1]", each.name) for each in wanted]
    return str(
        snapshot_download(
            repo, revision=revision, cache_dir=cache_dir, allow_patterns=names, local_files_only=not missing
        )
    )


def _wanted(name: HubName, listed: list[HubFile], *, with_weights: bool) -> list[HubFile]:
    """A GGUF file alone, or texts and safetensors."""
    texts = [each for each in listed if each.name.endswith(_TEXTS) or _MODULES.fullmatch(each.name)]
    if not with_weights:
        if not texts:
            raise ConfigError(f"{name.repo} has no tokenizer")
        return texts
    quantized = [each for each in listed if each.name.endswith(".gguf")]
    weights = [each for each in listed if each.name.endswith(_WEIGHTS) and each not in texts]
    if any(each.name.startswith("model") for each in weights):  # others are the same weights, in their makers' form
        weights = [each for each in weights if each.name.startswith("model")]
    if name.file is None and name.quant is None and weights:
        return [*texts, *weights]
    if not quantized:
        raise ConfigError(f"{name.repo} holds neither safetensors nor GGUF files at its root")
    return [_chosen(name, quantized)]


def _chosen(name: HubName, quantized: list[HubFile]) -> HubFile:
    whole = [each for each in quantized if _PART.search(each.name) is None and not each.name.startswith("mmproj")]
    if name.file is not None:
        found = [each for each in whole if each.name == name.file]
    elif name.quant is not None:
        ends = re.compile(rf"(?:^|[.\-_]){re.escape(name.quant)}\.gguf$", re.IGNORECASE)
        found = [each for each in whole if ends.search(each.name)]
    else:
        found = whole if len(whole) == 1 else []
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{each.name} ({size_text(each.size)})" for each in whole[:40]) or "none in one part"
    raise ConfigError(
        f"name one of the GGUF files of {name.repo}, as {name.repo}:QUANT or hf://{name.repo}/FILE: {known}"
    )


def _check_fit(name: HubName, wanted: Sequence[HubFile], memory_bytes: int, quantization: str | None) -> None:
    size = sum(each.size for each in wanted if each.name.endswith((_WEIGHTS, ".gguf")))
    needed = size * _QUANTIZED.get(quantization or "", 1.0)
    if needed <= memory_bytes:
        return
    smaller = [f"--quantization {kind} ({size_text(int(size * part))})" for kind, part in _QUANTIZED.items()]
    fits = [text for text, part in zip(smaller, _QUANTIZED.values()) if size * part <= memory_bytes]
    advice = f"; it would with {' or '.join(fits)}" if fits and not wanted[0].name.endswith(".gguf") else ""
    raise ConfigError(
        f"{name.repo}: its weights take {size_text(int(needed))}, and this device has {size_text(memory_bytes)}: it "
        f"does not fit, so nothing was fetched{advice}"
    )


def _check_disk(name: HubName, wanted: Sequence[HubFile], cache_dir: str | None) -> None:
    missing = sum(each.size for each in wanted if each.missing)
    place, free = free_disk(cache_dir)
    if missing > free:
        raise ConfigError(
            f"{name.repo}: {size_text(missing)} are to be fetched, and {place} has {size_text(free)} free: set "
            "HF_HOME or --download-dir to a larger disk"
        )


def _explained(name: HubName, work: Callable[[], T]) -> T:
    """Raises `ConfigError` with what to do, for what the library raises."""
    from huggingface_hub import errors

    repo = name.repo
    try:
        return work()
    except errors.GatedRepoError as error:
        raise ConfigError(f"{repo} is gated: ask for access on its page, and set HF_TOKEN to your token") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{repo} has no such revision (--revision)") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"model: {repo!r} is no directory here, and no repository that the hub shows: see its spelling; a "
            "private one needs HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, FileNotFoundError) as error:
        raise ConfigError(
            f"model: {repo!r} is no directory here, was not fetched before, and no hub can be asked now "
            "(HF_HUB_OFFLINE, HF_ENDPOINT, the network)"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{repo} cannot be fetched: {reason}; what has come is kept, and a next start goes on"
        ) from error
    except Exception as error:  # of an HTTP library underneath
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{repo} cannot be fetched: {reason}") from error
