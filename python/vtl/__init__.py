"""Ask for transport services, not for a protocol.

    import vtl

    with vtl.connect("10.0.0.2", 7000) as session:          # blocking
        session.sendall(b"hello")

    with vtl.Listener(7000) as listener:
        for session in listener:
            ...

    async with await vtl.aio.connect("10.0.0.2", 7000) as session:          # asyncio
        await session.sendall(b"hello")

The daemon vtld of this host does the work; its socket is named by the environment variable
VTL_SOCKET, or else /run/vtl/vtld.sock. Failures are OSError and its subclasses
(ConnectionRefusedError, TimeoutError, BrokenPipeError, ...) with the daemon's sentence, or
ValueError if what is asked for contradicts itself.
"""

from ._lib import Info, Preference, Requirements, Services, Statistics, Switches, version
from ._socket import Listener, Session, connect, respond
from . import aio

__all__ = [
    "Info",
    "Listener",
    "Preference",
    "Requirements",
    "Services",
    "Session",
    "Statistics",
    "Switches",
    "aio",
    "connect",
    "respond",
]
__version__ = version()
