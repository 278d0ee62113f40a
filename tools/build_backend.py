"""How the package is built: by setuptools, with the CPU's kernel libraries compiled first, for every instruction set.

So a first start compiles no C++, and needs no compiler. Nothing of torch is needed for that (`torch_abi.h`). Where
there is no compiler, or it fails, the package is built without them: the first start builds what its CPU takes.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  # the hooks that stay as they are
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[1]
DESCRIPTIONS = (
    "attention_backends.build",
    "attention_backends.crew_sources",
    "engine.cpu_kernels.build",
    "engine.sampling_sources",
    "engine.draft_sources",
    "engine.parallel.build",
)
Settings = dict[str, Any] | None


def build_wheel(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    if prebuild():
        from sysconfig import get_platform

        platform = get_platform().replace("-", "_").replace(".", "_")
        settings = {**(settings or {}), "--build-option": f"--plat-name={platform}"}
    return str(build_meta.build_wheel(directory, settings, metadata))


def build_editable(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    prebuild()
    return str(build_meta.build_editable(directory, settings, metadata))


def prebuild() -> bool:
    """Build what is not there yet, beside the sources; false where that does not work."""
    sys.path.insert(0, str(ROOT))
    from attention_backends import native_build
    from attention_backends.toolchain import BuildError

    began = time.monotonic()
    try:
        for name in DESCRIPTIONS:
            native_build.prebuild(import_module(name).sources())
    except (BuildError, OSError) as error:
        print(f"the package is built without kernel libraries: {error}", file=sys.stderr)
        return False
    finally:
        sys.path.remove(str(ROOT))
    print(f"kernel libraries: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return True


if __name__ == "__main__":
    raise SystemExit(not prebuild())
