"""For every room: covering arrays and few examples by default, full grids and many examples with --exhaustive; native
code for tests, which all workers and all runs share."""

from __future__ import annotations

import itertools
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from attention_backends.toolchain import default_cache_dir, find_compiler

# Before torch is loaded. Workers share the CPUs: small tensors need no second thread, and one that waits must not spin.
# Nobody here asks a real host, and each HTTP client reads all roots of trust: a tenth of the time if there is but one.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "SSL_CERT_FILE": str(Path(__file__).with_name("no_roots.pem")),
}
# A shell that starts this in the background has it ignored, and programs under test inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

TOO_SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("fast", max_examples=100, deadline=None, suppress_health_check=TOO_SLOW)
settings.register_profile("exhaustive", max_examples=2000, deadline=None, suppress_health_check=TOO_SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="full grids, and many examples of each property")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("exhaustive" if config.getoption("exhaustive") else "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --exhaustive: of a test marked `pairwise` the cases that `covering` chooses, for each value of what the
    marker names; nothing of what is marked `exhaustive`."""
    if config.getoption("exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    grids: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("pairwise")
        if marker is not None and isinstance(item, pytest.Function) and item not in left_out:
            apart = tuple(repr(item.callspec.params[name]) for name in marker.args)
            grids[item.path, item.originalname, apart].append(item)
    for cases in grids.values():
        kept = covering([[(name, repr(value)) for name, value in item.callspec.params.items()] for item in cases])
        left_out += [item for place, item in enumerate(cases) if place not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def covering(cases: Sequence[Iterable[object]]) -> set[int]:
    """Places of a few cases that together hold every pair of values that any case holds; greedily found."""
    pairs = [set(itertools.combinations(list(case), 2)) or {tuple(case)} for case in cases]
    missing = set().union(*pairs)
    kept: set[int] = set()
    while missing:
        best = max(range(len(pairs)), key=lambda place: len(pairs[place] & missing))
        kept.add(best)
        missing -= pairs[best]
    return kept


@pytest.fixture(scope="session")
def native_cache() -> Path:
    """Where kernels are built: found by the hash of their sources, flags and compilers, and built under a lock."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    return default_cache_dir()


@pytest.fixture(scope="session", autouse=True)
def shared_toolchain() -> Iterator[None]:
    """Empty caches of compiled pieces do without a toolchain of their own, which takes far longer than a piece."""
    from compilation import model, toolchain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "toolchain_directory", lambda _: toolchain.toolchain_directory(default_cache_dir()))
        yield


@pytest.fixture(scope="session", autouse=True)
def converted_here() -> Iterator[Callable[[str], bytes]]:
    """Directories' tokenizers are converted in this process: the child that does it for a program loads transformers
    and torch first, once for each model of a test. Yields what converts in a child."""
    import msgspec

    from engine.frontend import tokenizer_source

    in_a_child = tokenizer_source._convert

    def convert(path: str) -> bytes:
        return in_a_child(path) if os.path.isfile(path) else msgspec.json.encode(tokenizer_source._checked(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_source, "_convert", convert)
        yield in_a_child
