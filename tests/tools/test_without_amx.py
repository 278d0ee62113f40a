"""A command to which the CPU has no AMX: the permission is refused, everything else is as it was."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "without_amx.py"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="asks Linux on x86-64 for AMX"
)
ASK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def ask(code, argument):
    ctypes.set_errno(0)
    return libc.syscall(158, code, argument), ctypes.get_errno()
word = ctypes.c_ulong()
print(*ask(0x1023, 18), *ask(0x1003, ctypes.byref(word)))
"""
"""ARCH_REQ_XCOMP_PERM for the tiles' data, then ARCH_GET_FS"""


@pytest.fixture(autouse=True)
def _filters() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "true"], capture_output=True, text=True)
    if done.returncode and "prctl" in done.stderr:
        pytest.skip(f"this system takes no filter: {done.stderr.strip().rpartition(chr(10))[2]}")


def run(*command: str) -> str:
    return subprocess.run([sys.executable, str(TOOL), *command], capture_output=True, text=True, check=True).stdout


def test_tiles_are_refused_and_nothing_else():
    assert run(sys.executable, "-c", ASK).split() == ["-1", "1", "0", "0"]  # 1: EPERM


def test_children_inherit_it():
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}], check=True)"
    assert run(sys.executable, "-c", program).split()[:2] == ["-1", "1"]


def test_without_a_command_it_says_what_it_is():
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True)
    assert done.returncode == 1 and "COMMAND" in done.stderr
