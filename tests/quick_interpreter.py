"""Triton's interpreter, for processes that run all kernels by it (TRITON_INTERPRET=1): the same results in less than
half the time."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def quicker() -> list[tuple[Any, str, Any]]:
    """What to set, as (object, name, value). The language is patched once: by itself the interpreter does so for every
    call of every function, and undoes it after every launch. A type's NumPy type is looked up: it makes a table of all
    for every operation."""
    from triton import language
    from triton.runtime import interpreter

    patch_language, make_table = interpreter._patch_lang, interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}
    languages: dict[Any, frozenset[str]] = {}
    patched: set[str] = set()
    nothing_to_restore = interpreter._LangPatchScope()

    def patch_once(function: Any) -> Any:
        if function not in languages:
            modules = [value.__name__ for value in function.__globals__.values() if isinstance(value, ModuleType)]
            languages[function] = frozenset(name for name in modules if name.startswith("triton.language"))
        if not languages[function] <= patched:
            patched.update(languages[function])
            patch_language(function)
        return nothing_to_restore

    def numpy_type(dtype: Any) -> Any:
        of = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        name = "pointer" if isinstance(of, language.pointer_type) else of.name
        if name not in numpy_types:
            numpy_types[name] = make_table(dtype)
        return numpy_types[name]

    return [(interpreter, "_patch_lang", patch_once), (interpreter, "_get_np_dtype", numpy_type)]


def quicken() -> None:
    """From here on in this process."""
    for target, name, value in quicker():
        setattr(target, name, value)
