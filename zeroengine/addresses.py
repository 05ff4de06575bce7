"""Addresses of the network as people write them."""

from __future__ import annotations


def endpoint(address: str, port: int) -> str:
    """`address:port`, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
