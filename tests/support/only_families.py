"""A program that may open sockets of some address families alone, as RestrictAddressFamilies= does.

`python only_families.py "AF_INET AF_UNIX" PROGRAM ...` becomes PROGRAM, in which socket(2) of any
other family fails with EAFNOSUPPORT. Ends with 1 and the reason where the kernel forbids filters.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Sequence

#: socket(2), by machine.
SOCKET = {"x86_64": 41, "aarch64": 198}
#: linux/prctl.h, linux/seccomp.h.
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
#: linux/bpf_common.h: load a word of the call's data, compare it with a constant, return.
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06
#: Where struct seccomp_data has the call's number, and the low word of its first argument.
NUMBER, FIRST_ARGUMENT = 0, 16


class Program(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def instructions(families: Sequence[int], socket_call: int) -> bytes:
    """The filter; jumps are counted from the next instruction."""
    lines = [
        (LOAD, 0, 0, NUMBER),
        (EQUALS, 0, len(families) + 2, socket_call),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((EQUALS, len(families) - place, 0, each) for place, each in enumerate(families)),
        (RETURN, 0, 0, RET_ERRNO | errno.EAFNOSUPPORT),
        (RETURN, 0, 0, RET_ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def main(families: str, *command: str) -> None:
    """Restrict this process, and become `command`."""
    numbers = [int(getattr(socket, name)) for name in families.split()]
    code = instructions(numbers, SOCKET[platform.machine()])
    program = Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
