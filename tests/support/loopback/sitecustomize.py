"""What each Python process of a test loads at its start that has this directory first on its PYTHONPATH.

A connection to another machine, and the look-up of another name, is an error and is noted in a file. A connected UDP
socket is allowed: it sends nothing, and shows a program which address this machine has.
"""

import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any

_OWN = (None, "", b"", "localhost", socket.gethostname())  # audited, too: not in the hook


def _is_outside(host: object) -> bool:
    if host in _OWN:
        return False
    try:
        address = ipaddress.ip_address(str(host))
    except ValueError:
        return True
    return not (address.is_loopback or address.is_unspecified)


def _check(event: str, args: tuple[Any, ...]) -> None:
    host: object = None
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        passive = event == "socket.connect" and args[0].type == socket.SOCK_DGRAM
        host = None if passive else args[1][0]
    if _is_outside(host):
        with Path(os.environ["OUTSIDE"]).open("a") as noted:
            noted.write(f"{sys.argv}: {event}: {host}\n")
        raise ConnectionRefusedError(f"{host}: only this machine in a test")


if "OUTSIDE" in os.environ:
    sys.addaudithook(_check)
