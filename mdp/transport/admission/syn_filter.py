"""Blocks hosts in the kernel: their SYNs to a listening socket are dropped.

A classic BPF program, which needs no privileges (McCanne and Jacobson, The BSD Packet Filter,
USENIX 1993; Linux's Documentation/networking/filter.rst). Nothing of a blocked
host reaches this process or libzmq; its kernel retries after 1, 2, 4 seconds. Established
connections go on.
"""

import ctypes
import socket
import struct
from collections.abc import Collection
from ipaddress import IPv4Network, IPv6Network

Network = IPv4Network | IPv6Network
#: Code, how many to jump over if true and if false, and the operand.
Instruction = tuple[int, int, int, int]

#: If more networks are blocked, all new connections are.
MOST_NETWORKS = 64

# Of linux/bpf_common.h.
LOAD_WORD, LOAD_BYTE, AND, SHIFT_RIGHT, IF_EQUAL, RETURN = 0x20, 0x30, 0x54, 0x74, 0x15, 0x06
#: Offsets from here on count from the IP header, all others from the TCP header.
IP_HEADER = 0xFFF00000
#: Of asm-generic/socket.h; Python has no names for them.
_ATTACH, _DETACH = 26, 27
_FLAGS_AT, _SYN_AND_ACK, _SYN = 13, 0x12, 0x02
_IPV4_SOURCE_AT, _IPV6_SOURCE_AT = IP_HEADER + 12, IP_HEADER + 8
_PASS: Instruction = (RETURN, 0, 0, 0xFFFFFFFF)
_DROP: Instruction = (RETURN, 0, 0, 0)


def program(networks: Collection[Network]) -> list[Instruction]:
    """A filter of SYNs from `networks`: single IPv4 addresses, and IPv6 networks of 64 bits."""
    only_syns = [
        (LOAD_BYTE, 0, 0, _FLAGS_AT),
        (AND, 0, 0, _SYN_AND_ACK),
        (IF_EQUAL, 1, 0, _SYN),
        _PASS,
    ]
    if len(networks) > MOST_NETWORKS:
        return [*only_syns, _DROP]
    four: list[Instruction] = [(LOAD_WORD, 0, 0, _IPV4_SOURCE_AT)]
    six: list[Instruction] = []
    for network in networks:
        first = int(network.network_address)
        if isinstance(network, IPv4Network):
            four += [(IF_EQUAL, 0, 1, first), _DROP]
        else:
            six += [
                (LOAD_WORD, 0, 0, _IPV6_SOURCE_AT),
                (IF_EQUAL, 0, 3, first >> 96),
                (LOAD_WORD, 0, 0, _IPV6_SOURCE_AT + 4),
                (IF_EQUAL, 0, 1, first >> 64 & 0xFFFFFFFF),
                _DROP,
            ]
    four.append(_PASS)
    version = [(LOAD_BYTE, 0, 0, IP_HEADER), (SHIFT_RIGHT, 0, 0, 4), (IF_EQUAL, 0, len(four), 4)]
    return [*only_syns, *version, *four, *six, _PASS]


def block(listener: socket.socket, networks: Collection[Network]) -> None:
    """Block new connections to `listener` from `networks` alone; raises OSError."""
    if not networks:
        listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        return
    instructions = program(networks)
    code = b"".join(struct.pack("=HBBI", *one) for one in instructions)
    kept = ctypes.create_string_buffer(code)
    # struct sock_fprog; the kernel copies what it points to.
    where = struct.pack("@HP", len(instructions), ctypes.addressof(kept))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, where)
