"""Addresses that a crew may use: its messages are plain text."""

import ipaddress

#: RFC 1918, RFC 4193 (ULA), RFC 6598 (carriers' NAT, which overlay networks use), link-local.
PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16",
         "fc00::/7", "fe80::/10"),
    )
)  # fmt: skip


def is_private(address: str) -> bool:
    """Tell whether an address is loopback or private; one that stands for all is neither."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    return ip.is_loopback or any(ip in network for network in PRIVATE)
