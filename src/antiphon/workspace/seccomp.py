"""A seccomp filter for sandboxed commands, as a BPF program.

It refuses what a command line tool never needs and what has led out of containers before: kernel keys, BPF, io_uring,
userfaultfd, tracing other processes, mounts, new namespaces, unusual socket families, and TIOCSTI, which types
into a terminal.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

_LOAD_WORD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_BITS_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_X32_BIT = 0x40000000  # numbers of the x32 interface, which would pass the comparisons
_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEW*
_TYPE_INTO_TERMINAL, _TERMINAL_CONTROL = 0x5412, 0x541C  # TIOCSTI, TIOCLINUX
ALLOWED_SOCKET_FAMILIES = (1, 2, 10)  # unix, inet, inet6


class _Architecture(NamedTuple):
    audit: int
    """The number by which the kernel names it."""
    refused: Sequence[int]
    clone: int
    clone3: int
    unshare: int
    ioctl: int
    socket: int
    connect: int
    has_x32: bool


# The numbers from 424 on are the same everywhere: open_tree, move_mount, fsopen, fsconfig, fsmount, fspick,
# mount_setattr, io_uring_setup, io_uring_enter, io_uring_register.
_COMMON_REFUSED = (428, 429, 430, 431, 432, 433, 442, 425, 426, 427)
_ARCHITECTURE_BY_MACHINE = {
    "x86_64": _Architecture(
        audit=0xC000003E,
        # keyctl, add_key, request_key, bpf, userfaultfd, ptrace, perf_event_open, mount, umount2, pivot_root, chroot,
        # setns, swapon, swapoff, reboot, kexec_load, kexec_file_load, init_module, finit_module, delete_module, acct,
        # quotactl, process_vm_readv, process_vm_writev, kcmp, name_to_handle_at, open_by_handle_at, syslog
        refused=(
            *(
                250,
                248,
                249,
                321,
                323,
                101,
                298,
                165,
                166,
                155,
                161,
                308,
                167,
                168,
                169,
                246,
                320,
                175,
                313,
                176,
            ),
            *(163, 179, 310, 311, 312, 303, 304, 103),
        ),
        clone=56,
        clone3=435,
        unshare=272,
        ioctl=16,
        socket=41,
        connect=42,
        has_x32=True,
    ),
    "aarch64": _Architecture(
        audit=0xC00000B7,
        refused=(
            *(219, 217, 218, 280, 282, 117, 241, 40, 39, 41, 51, 268, 224, 225, 142, 104, 294, 105, 273, 106),
            *(89, 60, 270, 271, 272, 264, 265, 116),
        ),
        clone=220,
        clone3=435,
        unshare=97,
        ioctl=29,
        socket=198,
        connect=203,
        has_x32=False,
    ),
}


def build_filter(
    machine: str | None = None, *, socket_families: Sequence[int] = ALLOWED_SOCKET_FAMILIES
) -> bytes | None:
    """Return the filter for this machine, or None if its system calls are not known here."""
    known = _ARCHITECTURE_BY_MACHINE.get(machine or platform.machine())
    if known is None:
        return None
    program = [
        _load(_ARCHITECTURE_OFFSET),
        *_when_equal(known.audit, [], otherwise=[_return(_KILL_PROCESS)]),
        _load(_NUMBER_OFFSET),
    ]
    if known.has_x32:
        program += [_instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1), _refuse(errno.EPERM)]
    for number in (*known.refused, *_COMMON_REFUSED):
        program += _when_equal(number, [_refuse(errno.EPERM)])
    program += _when_equal(
        known.clone3, [_refuse(errno.ENOSYS)]
    )  # its flags are in memory; libraries use clone then
    for number in (known.clone, known.unshare):
        flagged = [_load(_ARGUMENTS_OFFSET), _instruction(_JUMP_BITS_SET, _NAMESPACE_FLAGS, 0, 1)]
        program += _when_equal(number, [*flagged, _refuse(errno.EPERM), _return(_ALLOW)])
    requests = [
        instruction
        for request in (_TYPE_INTO_TERMINAL, _TERMINAL_CONTROL)
        for instruction in _when_equal(request, [_refuse(errno.EPERM)])
    ]
    program += _when_equal(known.ioctl, [_load(_ARGUMENTS_OFFSET + 8), *requests, _return(_ALLOW)])
    families = [
        instruction for family in socket_families for instruction in _when_equal(family, [_return(_ALLOW)])
    ]
    program += _when_equal(known.socket, [_load(_ARGUMENTS_OFFSET), *families, _refuse(errno.EAFNOSUPPORT)])
    if not socket_families:  # a pair of sockets can be made, but not connected to anything else
        program += _when_equal(known.connect, [_refuse(errno.EACCES)])
    return b"".join([*program, _return(_ALLOW)])


def _when_equal(value: int, then: Sequence[bytes], otherwise: Sequence[bytes] = ()) -> list[bytes]:
    """Compare the loaded word; `otherwise` is run if it differs, then both go on."""
    if otherwise:
        return [_instruction(_JUMP_EQUAL, value, len(otherwise), 0), *otherwise, *then]
    return [_instruction(_JUMP_EQUAL, value, 0, len(then)), *then]


def _load(offset: int) -> bytes:
    return _instruction(_LOAD_WORD, offset)


def _refuse(error: int) -> bytes:
    return _return(_ERRNO | error)


def _return(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
