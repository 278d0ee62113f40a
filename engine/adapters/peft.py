"""PEFT's adapter directories: `adapter_config.json` and `adapter_model.safetensors`, which come from anywhere."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

from engine.adapters.config import LoRAConfig
from engine.adapters.expert_files import spread
from engine.adapters.request import LoRARequest
from engine.adapters.targets import Own, Part, Targets
from engine.adapters.tensor_file import FLOATING, StoredTensors, read_shapes
from engine.errors import ConfigError, InvalidRequestError, WeightsError
from engine.models.json_file import read_json_object, shown
from engine.models.spec import DecoderSpec
from engine.weights.arranged_source import rows_in_order

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_BYTES = 1 << 20
_MOST_NUMBER = 1e9
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_OF_EXPERTS = re.compile(r"(?:^|\.)experts\.\w+$")
_HEADER_BYTES, _NUMBER_BYTES = 1 << 24, 8
_NOTHING: dict[str, tuple[object, ...]] = {
    "use_dora": (),
    "use_qalora": (),
    "lora_bias": (),
    "modules_to_save": (),
    "trainable_token_indices": (),
    "alpha_pattern": (),
    "layer_replication": (),
    "megatron_config": (),
    "alora_invocation_tokens": (),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""what means another computation than B(A x), or weights beside A and B; with the values that do not"""

ReadTensors = Callable[[Path, int], StoredTensors]


class Factors(NamedTuple):
    """What an adapter adds to a part of a layer, as far as a rank has it: B (A x)."""

    own: Own
    a: torch.Tensor
    """[rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank], as files have it, in the decoder's order"""
    scale: float
    """of their product"""


class _Header(NamedTuple):
    part: Part
    a: str
    b: str
    rank: int


class KnownFiles:
    """What headers say of files that were checked: adapters of one training are alike in all but their numbers."""

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._headers: OrderedDict[bytes, list[_Header]] = OrderedDict()

    def headers(self, layout: bytes, check: Callable[[], list[_Header]]) -> list[_Header]:
        """As `check` found them when a file had that layout (`Layout.digest`) for the first time."""
        headers = self._headers.pop(layout, None) or check()
        self._headers[layout] = headers
        while len(self._headers) > self._most:
            self._headers.popitem(last=False)
        return headers


def check_files(adapter: LoRARequest, spec: DecoderSpec | None, config: LoRAConfig | None) -> str:
    """That they can be loaded, by what their headers say. Returns their version. Raises `InvalidRequestError`."""
    assert spec is not None and config is not None
    try:
        return AdapterFiles(adapter, Targets(spec, config), read_shapes).version()
    except (ConfigError, WeightsError) as error:
        raise InvalidRequestError(str(error), "lora_path") from error


class AdapterFiles:
    """An adapter, read once, whole, and checked: who writes to its files meanwhile changes nothing of it. Raises
    `ConfigError` and `WeightsError`."""

    def __init__(
        self, request: LoRARequest, targets: Targets, read: ReadTensors, known: KnownFiles | None = None
    ) -> None:
        """`read` tensors of at most so many bytes (`engine.adapters.tensor_file`)."""
        path = Path(request.lora_path)
        self._config = path / CONFIG
        self._file = path / WEIGHTS
        try:
            exist = self._config.is_file(), self._file.is_file()
        except OSError as error:
            raise ConfigError(f"lora_path cannot be read: {error}") from error
        if not exist[0]:
            raise ConfigError(
                f"{path}: no {CONFIG}: not a directory of an adapter as PEFT saves it (none is downloaded)"
            )
        config = read_json_object(self._config, _CONFIG_BYTES)
        self._check(config)
        self._alpha = self._number(config, "lora_alpha")
        self._root = config.get("use_rslora") is True
        if not exist[1]:
            raise WeightsError(f"{path}: no {WEIGHTS} (adapters in other formats are not read)")
        try:
            layout, self._tensors, self._digest = read(self._file, _most_bytes(targets))
        except KeyError as error:
            raise WeightsError(f"{self._file}: tensors are stored as {error}, not as floats") from error
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            raise WeightsError(
                f"{self._file}: cannot be read ({error}); copy it again if it is damaged or cut short"
            ) from error
        self._spread(targets)
        self._headers = (known or KnownFiles()).headers(layout.digest, lambda: self._read_headers(targets))
        self.dtype = layout.dtype
        """None: tensors are of several"""

    def version(self) -> str:
        """What both files hold."""
        return f"{self._digest().hex()} {self._alpha!r} {self._root}"

    def factors(self, dtype: torch.dtype, own_parts: Mapping[Part, Own], copied: bool = False) -> list[Factors]:
        """Of a rank, which has `own_parts`; in memory of their own if they are `copied`."""
        found = []
        for header in self._headers:
            own = own_parts.get(header.part)
            if own is None:
                continue
            scale = self._alpha / (math.sqrt(header.rank) if self._root else header.rank)
            a, b = self._tensors[header.a], rows_in_order(self._tensors[header.b], header.part.rows)
            if own.taken.rows is not None:
                b = torch.cat([b[span.first : span.end] for span in own.taken.rows])
            if own.taken.columns is not None:
                a = a[:, own.taken.columns.first : own.taken.columns.end]
            if b.dtype != dtype:
                b, scale = (b.float() * scale).to(dtype), 1.0
            a = a.to(dtype)
            if copied:
                a, b = a.clone(), b.clone()
            found.append(Factors(own, a, b, scale))
        return found

    def _check(self, config: dict[str, object]) -> None:
        kind = config.get("peft_type")
        if kind != "LORA":
            raise ConfigError(f"{self._config}: peft_type is {shown(kind)}; LORA is served")
        for name, fine in _NOTHING.items():
            value = config.get(name)
            if value and value not in fine:
                raise ConfigError(f"{self._config}: {name} is {shown(value)}, which is not supported")
        changed = config.get("target_parameters") or []
        if not isinstance(changed, list) or not all(_OF_EXPERTS.search(str(name)) for name in changed):
            raise ConfigError(f"{self._config}: target_parameters is {shown(changed)}; those of experts are supported")

    def _number(self, config: dict[str, object], name: str) -> float:
        value = config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _MOST_NUMBER:
            raise ConfigError(f"{self._config}: {name} must be a number, found {shown(value)}")
        return float(value)

    def _read_headers(self, targets: Targets) -> list[_Header]:
        pairs: dict[str, dict[str, str]] = {}
        for name in self._tensors:
            match = _NAME.fullmatch(name)
            if match is None:
                raise WeightsError(f"{self._file}: tensor {shown(name)} is no lora_A or lora_B: it is not supported")
            if pairs.setdefault(match[1], {}).setdefault(match[2], name) != name:
                raise WeightsError(f"{self._file}: {shown(match[1])} has lora_{match[2]} twice")
        if not pairs:
            raise WeightsError(f"{self._file}: holds no tensors")
        headers = [self._header(module, pair, targets) for module, pair in sorted(pairs.items())]
        if len({header.part for header in headers}) < len(headers):
            raise WeightsError(f"{self._file}: a matrix is adapted twice, under several names of its module")
        return headers

    def _spread(self, targets: Targets) -> None:
        """Of tensors that hold what is added to all experts of a layer, each expert's apart."""
        if not targets.has_stacks:
            return
        stacked: dict[str, dict[str, torch.Tensor]] = {}
        for name in list(self._tensors):
            match = _NAME.fullmatch(name)
            if match is not None and targets.find_stack(match[1]) is not None:
                pair = stacked.setdefault(match[1], {})
                if match[2] in pair:
                    raise WeightsError(f"{self._file}: {shown(match[1])} has lora_{match[2]} twice")
                pair[match[2]] = self._tensors.pop(name)
        try:
            apart = spread(stacked, targets)
        except ValueError as error:
            raise WeightsError(f"{self._file}: {error}") from error
        if twice := sorted(apart.keys() & self._tensors.keys()):
            raise WeightsError(f"{self._file}: {twice[0]} is there for one expert, and among those of all")
        self._tensors |= apart

    def _header(self, module: str, pair: dict[str, str], targets: Targets) -> _Header:
        part = targets.find(module)
        if part is None:
            if targets.lacks_experts(module):
                raise WeightsError(f"{self._file}: {shown(module)} changes experts: set --max-lora-expert-rank, too")
            known = ", ".join(targets.kinds)
            raise WeightsError(f"{self._file}: {shown(module)} cannot be adapted here; {known} of this model can")
        if len(pair) != 2:
            raise WeightsError(f"{self._file}: {shown(module)} has lora_{next(iter(pair))} alone")
        shapes = {}
        for letter, name in pair.items():
            found = self._tensors[name]
            if found.dtype not in FLOATING.values():
                raise WeightsError(f"{self._file}: tensor {name} is stored as {found.dtype}, not as floats")
            shapes[letter] = tuple(found.shape)
        rank = shapes["A"][0] if shapes["A"] else 0
        expected = {"A": (rank, targets.inputs[part.layer]), "B": (part.rows.count, rank)}
        for letter, name in pair.items():
            if shapes[letter] != expected[letter]:
                raise WeightsError(
                    f"{self._file}: tensor {name} has shape {shapes[letter]}, expected {expected[letter]}"
                )
        most, setting = targets.most_rank(part), "" if part.rows.expert is None else "-expert"
        if not 1 <= rank <= most:
            served = f"1 to {most} are served (--max-lora{setting}-rank)"
            raise WeightsError(f"{self._file}: {module} has rank {rank}; {served}")
        return _Header(part, pair["A"], pair["B"], rank)


def _most_bytes(targets: Targets) -> int:
    return _HEADER_BYTES + targets.most_values * _NUMBER_BYTES
