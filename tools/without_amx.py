"""Runs a command to which this CPU has no AMX: what AMX's absence costs is measured on a machine that has it.

    python tools/without_amx.py COMMAND [ARG ...]

A process must ask Linux for the tiles' state (`arch_prctl(ARCH_REQ_XCOMP_PERM)`) before its first tile instruction.
Here a seccomp filter, which all children inherit, answers EPERM: this engine, oneDNN and what is built on it (torch,
OpenVINO) then take their kernels of AVX-512. What looks at CPUID alone must be told by its own means.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM = 158, 0x1023
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
"""BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K"""
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, FIRST_ARGUMENT = 0, 16
"""offsets in `struct seccomp_data`"""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _instructions() -> bytes:
    program = (
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, 3, SYS_ARCH_PRCTL),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 0, 1, ARCH_REQ_XCOMP_PERM),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def refuse_amx() -> None:
    """For this process and all that it starts. Raises OSError where Linux takes no filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    text = _instructions()
    program = _Program(len(text) // 8, text)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl", str(arguments[0]))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit("without_amx: asks Linux on x86-64, the only one with AMX")
    refuse_amx()
    os.execvp(sys.argv[1], sys.argv[1:])
