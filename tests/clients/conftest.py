from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_envs import MODEL

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("end_to_end", "entrypoints")]

CONTEXT = 4096


@pytest.fixture(scope="session")
def served() -> Iterator[str]:
    """URL of a server that refuses fields which nobody knows, and whose model always answers the same."""
    from serving import serving
    from smollm2 import smollm2_path

    greedy = ("--override-generation-config", '{"temperature": 0}', "--compile", "none")
    memory = ("--kv-cache-memory", "512MiB", "--max-model-len", str(CONTEXT))
    with serving(smollm2_path(), "--served-model-name", MODEL, "--strict-fields", *memory, *greedy) as url:
        yield url


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the demo model's, for clients that count tokens themselves."""
    from smollm2 import smollm2_path
    from transformers import AutoTokenizer

    weights, folder = Path(smollm2_path()), tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)
    return folder
