"""Every dialect that is known by name. What a family writes is a fact about its models: their chat templates show it
(`tools/check_dialects.py`).

`fields` reads generously (whitespace, marks that are left out), `form` writes exactly what the models were taught.
"""

from __future__ import annotations

from engine.dialects.forms import Dialect
from engine.dialects.json_families import JSON_FAMILIES
from engine.dialects.tagged_families import PYTHON_FAMILIES, TAGGED_FAMILIES

DIALECTS: dict[str, Dialect] = {each.name: each for each in (*TAGGED_FAMILIES, *JSON_FAMILIES, *PYTHON_FAMILIES)}
"""in the order in which a chat template is compared with them"""

THINKING_ONLY = Dialect(name="thinking")
PLAIN = Dialect(name="none", thinking=None)

ALIASES = {
    # vLLM's names for parsers of calls
    "deepseek_r1": "deepseek_v3",
    "glm47": "glm45",
    "gpt_oss": "harmony",
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "llama4_json": "llama3_json",
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
    "qwen3_xml": "qwen3_coder",
}
