"""Parse, check and compare addresses as users write them: ``host:port``, separated by commas.

Pure: makes no name lookups. Must not import TensorFlow.
"""

import ipaddress
import re
from collections.abc import Callable, Sequence

from tfps.text import show

MAX_TASKS = 4096

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104  compared with hosts, never bound


def parse_hosts(flag_name: str, text: str, problems: list[str]) -> tuple[str, ...]:
    """Return the addresses in a flag like ``--ps_hosts=h1:2222,h2:2222``, one per task, including bad ones.

    Args:
        flag_name: The flag's name, without dashes.
        text: The flag's value.
        problems: Gets a line for each bad address.
    """
    if not text.strip():
        problems.append(f"--{flag_name} is empty: give host:port,host:port.")
        return ()
    return check_hosts(f"--{flag_name}", text.split(","), problems)


def check_hosts(place: str, hosts: Sequence[str], problems: list[str]) -> tuple[str, ...]:
    """Return the addresses of a list, including bad ones; ``place`` is the name of the list in ``problems``."""
    if len(hosts) > MAX_TASKS:
        problems.append(f"{place} has {len(hosts):,} addresses: a cluster can have at most {MAX_TASKS:,} tasks.")
        return ()
    found = [(show(host) if host else f"address {n}", address_problem(host)) for n, host in enumerate(hosts, 1)]
    problems += first_few([f"{place}: {shown} {problem}." for shown, problem in found if problem], place)
    return tuple(hosts)


def first_few(lines: list[str], place: str, most: int = 5) -> list[str]:
    """Return the first ``most`` problems of a list, and a line with the number of the others."""
    more = len(lines) - most
    return [*lines[:most], f"{place}: and {more:,} more like these."] if more > 0 else lines


_WRONG = (
    (re.compile(r"\A\Z"), "is empty: write host:port, or drop a comma"),
    (re.compile(r"[^\x00-\x7f]"), "is not ASCII: write the host's ASCII name"),
    (re.compile(r"[\x00-\x20\x7f]"), "has a blank or a control character: write host:port,host:port without any"),
    (re.compile(r"://"), "is a URL: write host:port alone"),
    (re.compile(r"@"), "names a user: write host:port alone"),
    (re.compile(r"/"), "has a slash: write host:port alone"),
    (re.compile(r"\A[0-9a-fA-F]*:[0-9a-fA-F:.]*:[0-9a-fA-F.]*\Z"), "is IPv6 without brackets: write [address]:port"),
    (re.compile(r"\A[^\[].*:.*:"), "has more than one colon: write host:port,host:port"),
    (re.compile(r"\A[^:]*\Z|\]\Z"), "has no port: write host:port, like h1:2222"),
)


def address_problem(address: str) -> str:
    """Return the problem with an address and how to fix it; an empty string if the address is valid."""
    for pattern, problem in _WRONG:
        if pattern.search(address):
            return problem
    host, _, port = address.rpartition(":")
    if not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > 65535:
        return f"has port {show(port)}: write a whole number from 1 to 65535"
    return _host_problem(host)


def _host_problem(host: str) -> str:
    if host.startswith("["):
        good = host.endswith("]") and "%" not in host and _is_ip(ipaddress.IPv6Address, host[1:-1])
        return "" if good else "has no IPv6 address in its brackets: write [address]:port, like [::1]:2222"
    if re.fullmatch("[0-9.]+", host):
        good = _is_ip(ipaddress.IPv4Address, host)
        return "" if good else "has no IPv4 address: write four numbers from 0 to 255, like 10.0.0.1:2222"
    parts = host.removesuffix(".").split(".")
    if len(host) <= 253 and all(re.fullmatch(r"\w|\w[\w-]{0,61}\w", part, re.ASCII) for part in parts):
        return ""
    return "has a bad host name: use letters, digits, _ and inner -, at most 63 between dots and 253 in all"


def normalized(address: str) -> str:
    """Return the canonical form of an address: lower case, no trailing dot, ``localhost`` for all loopback names."""
    host, _, port = address.lower().rpartition(":")
    host = host.strip("[]").removesuffix(".")
    if ":" in host and _is_ip(ipaddress.IPv6Address, host):
        host = ipaddress.IPv6Address(host).compressed
    return f"{'localhost' if host in _LOOPBACK else host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Return the host and port of a valid ``host:port``; an IPv6 address loses its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_ip(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
