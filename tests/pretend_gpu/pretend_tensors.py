"""Tensors of a pretend GPU: memory of the host, behind a mark that says on which side it lies.

A CPU tensor whose storage is marked is "on the device": it says `cuda:0`, meets no host tensor in an operation, has no
NumPy view, and where it is looked at the host waits. `DeviceMode` sees every call of torch in its thread and keeps to
the rules that a real device has; what runs *on* the device (kernels, compiled pieces) runs in `on_device`, where memory
is just memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pretend_queues import DEVICE, Machine
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import _device_constructors

_MARK = "pageloom_pretend_place"
HOST, PINNED, ON_DEVICE = "host", "pinned", "device"

_WAITS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "is_nonzero"),
    *("equal", "allclose", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "histc"),
}
"""operations of torch whose result is on the host, or has a shape that only the data knows"""
_SHAPE_OF_OTHER = {
    *("view_as", "expand_as", "reshape_as", "is_same_size", "is_set_to", "set_", "__set__"),
    "_has_compatible_shallow_copy_type",
}
"""operations whose second tensor's data is not touched"""
_FREE = frozenset({"untyped_storage", "size", "stride", "dim", "numel", "is_contiguous", "data_ptr", "element_size"})


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None for what has no memory: fake and meta tensors."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return None
    return tensor.untyped_storage()


def place_of(tensor: torch.Tensor) -> str:
    storage = storage_of(tensor)
    return HOST if storage is None else getattr(storage, _MARK, HOST)


def put(value: Any, place: str, machine: Machine) -> Any:
    """Mark the tensors in `value` that are new; returns it."""
    for tensor in tensors_in(value):
        storage = storage_of(tensor)
        if storage is not None and not hasattr(storage, _MARK):
            put_storage(storage, place, machine)
    return value


def put_storage(storage: torch.UntypedStorage, place: str, machine: Machine) -> None:
    setattr(storage, _MARK, place)
    if place == ON_DEVICE:
        machine.allocated_bytes += storage.nbytes()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def require_on_device(what: str, values: Any) -> None:
    """A kernel that is given host memory (that is not pinned) would fault. Says nothing `on_device`."""
    for tensor in tensors_in(values) if active() else ():
        if place_of(tensor) == HOST:
            raise ValueError(f"{what}: a tensor {tuple(tensor.shape)} {tensor.dtype} lies in pageable host memory")


def active() -> bool:
    """Whether this thread sees the pretend GPU."""
    return any(isinstance(mode, DeviceMode) for mode in _get_current_function_mode_stack())


@contextmanager
def on_device() -> Iterator[None]:
    """What runs inside is the device's own work (or a compiler's): no rules, tensors are the CPU's."""
    modes = []
    while _get_current_function_mode_stack():
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


class DeviceMode(TorchFunctionMode):
    """The rules of a device, for one thread."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self._special: dict[str, Callable[[str, Any, list[Any], dict[str, Any]], Any]] = {
            "get device": self._device,
            "get is_cuda": lambda name, func, args, kwargs: place_of(args[0]) == ON_DEVICE or func(*args),
            "get is_cpu": lambda name, func, args, kwargs: place_of(args[0]) != ON_DEVICE and func(*args),
            "get_device": lambda name, func, args, kwargs: 0 if place_of(args[0]) == ON_DEVICE else func(*args),
            "is_pinned": lambda name, func, args, kwargs: place_of(args[0]) == PINNED,
            "pin_memory": self._pin_memory,
            "to": self._to,
            "cuda": self._to,
            "cpu": self._to,
            "copy_": self._copy,
            "numpy": self._numpy,
            "__array__": self._numpy,
            "__getitem__": self._index,
            "__setitem__": self._index,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = f"get {getattr(func.__self__, '__name__', '')}"
        if name in _FREE or name in ("get shape", "get dtype", "get nbytes", "get is_meta"):
            return func(*args, **(kwargs or {}))
        special = self._special.get(name, self._run)
        return special(name, func, list(args), dict(kwargs or {}))

    def _run(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in((args, kwargs))
        here = any(place_of(tensor) == ON_DEVICE for tensor in inputs)
        wanted = kwargs.get("device")
        if wanted is None and not inputs and func in _device_constructors():
            wanted = torch.get_default_device()
        pinned = bool(kwargs.pop("pin_memory", False))
        if wanted is not None:
            here = torch.device(wanted).type == DEVICE.type
            if here:
                kwargs["device"] = torch.device("cpu")
                if name in ("tensor", "as_tensor", "asarray"):
                    self.machine.host_waits(f"torch.{name}(..., device=cuda) copies pageable memory")
        elif here and name not in _SHAPE_OF_OTHER:
            self._check_one_side(name, inputs)
        elif name in _SHAPE_OF_OTHER:
            here = place_of(args[0]) == ON_DEVICE
        if pinned and here:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if here and (name in _WAITS or (name == "where" and len(args) == 1)):
            self.machine.host_waits(name)
        if here and name == "repeat_interleave" and "output_size" not in kwargs and tensors_in(args[1:]):
            self.machine.host_waits("repeat_interleave without output_size")
        result = func(*args, **kwargs)
        if here:
            put(result, ON_DEVICE, self.machine)
            self.machine.queue(func, args, kwargs, result)
        elif pinned:
            put(result, PINNED, self.machine)
        return result

    def _check_one_side(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        for tensor in inputs:
            if place_of(tensor) != ON_DEVICE and tensor.dim() > 0 and not tensor.is_meta:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                    f"({name} got a tensor {tuple(tensor.shape)} {tensor.dtype} of the host)"
                )

    def _device(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.device:
        found: torch.device = func(*args)
        return DEVICE if place_of(args[0]) == ON_DEVICE else found

    def _pin_memory(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        source: torch.Tensor = args[0]
        if place_of(source) == ON_DEVICE:
            raise RuntimeError("cannot pin 'torch.cuda.Tensor' only dense CPU tensors can be pinned")
        if place_of(source) == PINNED:
            return source
        pinned: torch.Tensor = put(source.clone(), PINNED, self.machine)
        return pinned

    def _numpy(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if place_of(args[0]) == ON_DEVICE:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
        return func(*args, **kwargs)

    def _index(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target, index = args[0], args[1]
        if place_of(target) != ON_DEVICE:
            return self._run(name, func, args, kwargs)
        parts = index if isinstance(index, tuple) else (index,)
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        for part in parts:
            if isinstance(part, list) or (
                isinstance(part, torch.Tensor) and part.dim() and place_of(part) != ON_DEVICE
            ):
                self.machine.host_waits(f"{name} with an index of the host")
            elif isinstance(part, torch.Tensor) and part.dtype == torch.bool and name == "__getitem__":
                self.machine.host_waits("boolean indexing")
        if name == "__setitem__":
            self._check_assigned(target, index, args[2], tensors)
        # Indices and assigned values of the host are copied over: no mixture.
        result = func(*args, **kwargs)
        put(result, ON_DEVICE, self.machine)
        self.machine.queue(func, args, kwargs, result)
        return result

    def _check_assigned(self, target: torch.Tensor, index: Any, value: Any, tensors: list[torch.Tensor]) -> None:
        if isinstance(value, torch.Tensor) and value.dim() and place_of(value) != ON_DEVICE:
            self.machine.host_waits("__setitem__ with a tensor of the host")
        elif not isinstance(value, torch.Tensor):
            by_numbers = any(part.dtype != torch.bool for part in tensors)
            if by_numbers or (not tensors and target[index].dim() == 0):
                self.machine.host_waits("__setitem__ of a scalar of the host")

    def _to(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        source: torch.Tensor = args[0]
        target, rest, options = _target(name, args[1:], kwargs)
        from_device = place_of(source) == ON_DEVICE
        to_device = from_device if target is None else torch.device(target).type == DEVICE.type
        if source.is_meta or (target is not None and torch.device(target).type == "meta"):
            return func(*args, **kwargs)  # type: ignore[no-any-return]  # torch's own result
        if from_device == to_device:
            result: torch.Tensor = source.to(*rest, **options) if rest or options else source
            if to_device and result is not source:
                put(result, ON_DEVICE, self.machine)
                self.machine.queue(torch.Tensor.to, [source, *rest], options, result)
            return result
        waits = not options.pop("non_blocking", False)
        options.pop("copy", None)
        if to_device and (waits or place_of(source) != PINNED):
            self.machine.host_waits(f"{name}: a copy to the device that waits, or of pageable memory")
        if from_device:
            self.machine.host_waits(f"{name}: a copy to pageable memory")
        moved = source.to(*rest, copy=True, **options)
        if to_device:
            put(moved, ON_DEVICE, self.machine)
            self.machine.queue(torch.Tensor.to, [source, *rest], options, moved)
        return moved

    def _copy(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        target: torch.Tensor = args[0]
        source: torch.Tensor = args[1] if len(args) > 1 else kwargs["src"]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        to_device, from_device = (place_of(x) == ON_DEVICE for x in (target, source))
        if to_device == from_device or (to_device and source.dim() == 0 and source.numel() == target.numel() == 0):
            return self._run(name, func, args, kwargs)  # type: ignore[no-any-return]  # torch's own result
        host = source if to_device else target
        if not non_blocking or place_of(host) != PINNED:
            self.machine.host_waits("copy_ that waits, or of pageable memory")
        if to_device:
            target.copy_(source)
            self.machine.queue(torch.Tensor.copy_, [target, source], {}, target)
        elif non_blocking:
            self.machine.send_to_host(source, target)
        else:
            self.machine.deliver()
            target.copy_(source)
        return target


def _target(name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """The device that `to`, `cuda` or `cpu` names (None: none), and the arguments without it."""
    if name == "cpu":
        return torch.device("cpu"), [], {}
    if name == "cuda":
        return DEVICE, [], {k: v for k, v in kwargs.items() if k == "non_blocking"}
    options = dict(kwargs)
    other = options.pop("device", None)
    rest = []
    for value in args:
        if isinstance(value, (torch.device, str)) and other is None:
            other = value
        elif isinstance(value, torch.Tensor):
            other, value = (DEVICE if place_of(value) == ON_DEVICE else torch.device("cpu")), value.dtype
            rest.append(value)
        else:
            rest.append(value)
    if rest and isinstance(rest[-1], bool):
        options["non_blocking"] = rest.pop()
    return other, rest, options


def started_where_active() -> tuple[Callable[[threading.Thread], None], Callable[[threading.Thread], None]]:
    """`Thread.start` and `Thread.run` for threads that see the device when who started them does."""
    start, run = threading.Thread.start, threading.Thread.run

    def inheriting_start(thread: threading.Thread) -> None:
        modes = [m for m in _get_current_function_mode_stack() if isinstance(m, DeviceMode)]
        thread.__dict__["pretend_mode"] = modes[0] if modes else None
        start(thread)

    def inheriting_run(thread: threading.Thread) -> None:
        mode = thread.__dict__.get("pretend_mode")
        if mode is None:
            run(thread)
        else:
            with DeviceMode(mode.machine):
                run(thread)

    return inheriting_start, inheriting_run
