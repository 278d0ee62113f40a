"""Adapters read one after the other: what is alike is checked once, and memory that nobody needs is used again."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny_adapters import request, save_adapter
from tiny_families import save_tiny

from engine.adapters import peft, tensor_file
from engine.adapters.config import LoRAConfig
from engine.adapters.peft import AdapterFiles, check_files
from engine.adapters.reader import AdapterReader, ReadAdapter
from engine.adapters.targets import Targets, own_parts
from engine.adapters.tensor_file import TensorFile
from engine.errors import ConfigError, InvalidRequestError, WeightsError
from engine.models.description import describe
from engine.models.spec import DecoderSpec

CONFIG = LoRAConfig(max_lora_rank=16, max_loras=1, max_cpu_loras=1)
MOST = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, DecoderSpec]:
    path = tmp_path_factory.mktemp("model")
    module = save_tiny("Llama", path)
    spec = describe(str(path)).spec
    assert spec is not None
    return module, spec


def reader(spec: DecoderSpec, dtype: torch.dtype = torch.bfloat16, is_part: bool = False) -> AdapterReader:
    targets = Targets(spec, CONFIG)
    return AdapterReader(targets, own_parts(spec, targets, None, None), dtype, is_part)


def stored(path: Path, dtype: torch.dtype, odd: bool = False) -> dict[str, torch.Tensor]:
    """`odd`: one tensor of another type."""
    file = path / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    if odd:
        first = min(tensors)
        tensors[first] = tensors[first].double()
    save_file(tensors, file)
    return tensors


def assert_as_stored(read: ReadAdapter, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    left = {name.rpartition(".lora_")[0] for name in tensors}
    for own, a, b, scale in read.factors:
        [module] = [
            name
            for name in left
            if torch.equal(tensors[f"{name}.lora_A.weight"].to(dtype), a)
            and torch.allclose(tensors[f"{name}.lora_B.weight"].float() * 2.0, b.float() * scale, rtol=0.01)
        ]
        left.discard(module)
        assert a.dtype == b.dtype == dtype and own.inputs == a.size(1)
    assert not left


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_read_before_stays_as_it_is(
    model: tuple[torch.nn.Module, DecoderSpec], dtype: torch.dtype, odd: bool, is_part: bool, tmp_path: Path
) -> None:
    """Released memory alone is used again; of factors that were copied, or converted, at once."""
    module, spec = model
    tensors = []
    for number in range(4):
        save_adapter(tmp_path / str(number), module, number)
        tensors.append(stored(tmp_path / str(number), dtype, odd))
    reads = reader(spec, is_part=is_part)
    found = [reads.read(request(tmp_path / str(number))) for number in range(3)]
    assert all((each.memory is not None) == (dtype == torch.bfloat16 and not odd and not is_part) for each in found)
    for each, expected in zip(found, tensors, strict=False):
        assert_as_stored(each, expected, torch.bfloat16)
    released = found.pop(1)
    reads.release(released)
    last = reads.read(request(tmp_path / "3"))
    assert_as_stored(last, tensors[3], torch.bfloat16)
    assert_as_stored(found[0], tensors[0], torch.bfloat16)
    assert_as_stored(found[1], tensors[2], torch.bfloat16)
    assert last.memory is released.memory and (last.digest != "") == is_part


def test_files_alike_are_checked_once_and_others_as_ever(
    model: tuple[torch.nn.Module, DecoderSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, spec = model
    checked: list[str] = []
    check = AdapterFiles._header

    def counted(self: AdapterFiles, name: str, *rest: object) -> object:
        checked.append(name)
        return check(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(AdapterFiles, "_header", counted)
    for number in range(3):
        save_adapter(tmp_path / str(number), module, number)
    save_adapter(tmp_path / "other", module, 9, rank=4)
    reads = reader(spec)
    reads.read(request(tmp_path / "0"))
    once = len(checked)
    reads.read(request(tmp_path / "1"))
    assert len(checked) == once > 0
    reads.read(request(tmp_path / "other"))
    assert len(checked) == 2 * once
    tensors = load_file(tmp_path / "2" / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "2" / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match="alone"):
        reads.read(request(tmp_path / "2"))
    many = peft.KnownFiles(most=2)
    for width in (1, 2, 3, 1):
        many.headers(b"%d" % width, lambda: checked.append("again") or [])  # type: ignore[func-returns-value]
    assert checked.count("again") == 4 and len(many._headers) == 2


@pytest.mark.parametrize("change", ["numbers", "alpha", "names", "places"])
def test_files_are_what_they_were_when_they_were_checked(
    model: tuple[torch.nn.Module, DecoderSpec], change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or they are refused, until they are checked again; without a version whatever is there is taken."""
    module, spec = model
    monkeypatch.setattr(tensor_file, "_PIECE", 1 << 12)
    save_adapter(tmp_path, module, 0)
    version, reads = check_files(request(tmp_path), spec, CONFIG), reader(spec)
    adapter = replace(request(tmp_path), version=version)
    reads.read(adapter)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors = load_file(file)
    if change == "numbers":
        tensors[min(tensors)][0, 0] += 1
    elif change == "names":
        one, two = (f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight" for layer in (0, 1))
        tensors[one], tensors[two] = tensors[two], tensors[one]
    elif change == "places":
        tensors[min(tensors)][0] = tensors[min(tensors)][0].view(torch.int64).flip(0).view(torch.float32)
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 3.5}))
    save_file(tensors, file)
    with pytest.raises(ConfigError, match="load it again"):
        reads.read(adapter)
    reads.read(request(tmp_path))
    other = replace(adapter, version=check_files(adapter, spec, CONFIG))
    reads.read(other)
    assert other.key != adapter.key, "what was computed with the other one is not its own"


def test_a_file_is_read_as_it_lies(tmp_path: Path) -> None:
    """Its tensors in any order, empty ones, and numbers that begin at any byte."""
    header = {
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [2, 10]},
        "none": {"dtype": "F16", "shape": [0, 3], "data_offsets": [2, 2]},
        "a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]},
    }
    text = json.dumps(header).encode()
    numbers = torch.tensor([1.5], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    numbers += torch.tensor([2.5, -3.5]).view(torch.uint8).numpy().tobytes()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    reads = TensorFile()
    for _ in range(2):
        found = reads.read(tmp_path / "file", MOST).tensors
    assert found["a"].tolist() == [1.5] and found["b"].tolist() == [2.5, -3.5] and found["none"].shape == (0, 3)
    assert found["b"].data_ptr() % 4 == 0


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    save_file({"a": torch.ones(4)}, file)
    fill = TensorFile._room

    def changed(self: TensorFile, size: int) -> torch.Tensor:
        with open(file, "ab") as writer:
            writer.write(b"more")
        return fill(self, size)

    monkeypatch.setattr(TensorFile, "_room", changed)
    with pytest.raises(ValueError, match="changed while it was read"):
        TensorFile().read(file, MOST)
    save_file({"a": torch.ones(4)}, file)
    monkeypatch.setattr(TensorFile, "_room", lambda self, size: (os.truncate(file, 8), fill(self, size))[1])
    with pytest.raises(ValueError, match="cut while it was read"):
        TensorFile().read(file, MOST)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_nobody_waits_for_who_might_write_to_a_pipe(
    model: tuple[torch.nn.Module, DecoderSpec], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was a file when it was looked at."""
    module, spec = model
    save_adapter(tmp_path, module, 0)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    problems: list[BaseException] = []

    def check() -> None:
        try:
            check_files(request(tmp_path), spec, CONFIG)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    thread.join(60)
    assert isinstance(problems[0], InvalidRequestError) and "not a file" in str(problems[0])
    assert isinstance(problems[0].__cause__, ConfigError | WeightsError)
