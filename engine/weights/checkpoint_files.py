"""Which files of a directory are its checkpoint: without torch, so that plans read the same ones as the loader."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError, WeightsError
from engine.models.bounds import INDEX_BYTES
from engine.models.json_file import read_json_object, shown

INDEX = "model.safetensors.index.json"


def indexed_files(directory: Path) -> dict[str, str] | None:
    """File by tensor, as the index has it; None: there is no index. Raises WeightsError."""
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        weight_map = read_json_object(path, INDEX_BYTES).get("weight_map")
    except ConfigError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(weight_map, dict):
        raise WeightsError(f"{path}: weight_map must be an object, found {shown(weight_map)}")
    promised: dict[str, str] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(
                f"{path}: weight_map[{shown(name)}] is {shown(file)}, "
                "which is not a file of this directory with a name in .safetensors"
            )
        promised[name] = file
    return promised


def checkpoint_files(directory: Path, promised: dict[str, str] | None) -> list[str]:
    """Those of the index; else model.safetensors, beside which makers put the same weights in a form of their own; else
    all. Raises WeightsError where there are none."""
    if promised is not None:
        return sorted(set(promised.values()))
    if (directory / "model.safetensors").is_file():
        return ["model.safetensors"]
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{directory}: no *.safetensors file (other weight formats are not read)")
    return files
