"""What is under docs/deploy: each file is read by its own tool, and the options in them are the server's."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from entrypoints.serve import build_parser
from entrypoints.sources import parse_all

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
BASE = DEPLOY / "kubernetes"


def test_the_dockerfile_is_what_its_linter_wants() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    run = subprocess.run([str(hadolint), str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_image_runs_as_root_and_its_settings_are_options() -> None:
    for stage in re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]:
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE) == ["10001"]
        entry = stage.index("ENTRYPOINT")
        assert stage.index("USER 10001") < entry
        variables = dict(re.findall(r"(PAGELOOM_[A-Z]+)=(\S+)", stage))
        assert variables.pop("PAGELOOM_CACHE") == "/cache"
        options = parse_all(build_parser(), ["model"], variables)
        assert (options.host, options.port) == ("0.0.0.0", 8000)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_the_unit_is_one_and_starts_what_there_is(tmp_path: Path) -> None:
    text = (DEPLOY / "pageloom.service").read_text()
    [command] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *arguments = shlex.split(command)
    assert program.endswith("/engine-serve") and arguments == ["--config", "/etc/pageloom/pageloom.yaml"]
    unit = tmp_path / "pageloom.service"
    unit.write_text(text.replace(program, shutil.which("true") or "/bin/true"))
    run = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    own = [line for line in (run.stdout + run.stderr).splitlines() if "pageloom.service" in line]
    assert run.returncode == 0 and not own, own


def manifests() -> list[dict[str, Any]]:
    """As kubectl builds them."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    run = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(run.stdout))


def test_manifests_are_kubernetes_and_belong_together() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = manifests()
    for each in found:
        validate.validate(each, "1.31", strict=True)
    kinds = {each["kind"]: each for each in found}
    assert kinds.keys() >= {"Deployment", "Service", "PersistentVolumeClaim", "Namespace"}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    settings = yaml.safe_load((BASE / "pageloom.yaml").read_text())
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    assert str(Path(settings["keys"]).parent) in mounted and str(Path(container["args"][1]).parent) in mounted
    assert pod["terminationGracePeriodSeconds"] > settings["drain-delay"] + settings["shutdown-timeout"]
    probe = container["readinessProbe"]
    assert settings["drain-delay"] > probe["periodSeconds"] * probe["failureThreshold"]
    options = parse_all(
        build_parser(), ["--config", str(BASE / "pageloom.yaml")], {"PAGELOOM_PORT": "tcp://10.0.0.1:80"}
    )
    assert options.model == settings["model"] and options.port == container["ports"][0]["containerPort"]
