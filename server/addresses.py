"""Addresses and URLs of daemons."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def base_url(host: str, port: int) -> str:
    """What OpenAI's clients call the base URL of a daemon at the host."""
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
