"""Addresses of the network as people write them."""

from __future__ import annotations


def endpoint(address: str, port: int) -> str:
    """`address:port`, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def unbracketed(host: str) -> str:
    """A host without the brackets in which some write an IPv6 address; a name of a host as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") and ":" in host else host
