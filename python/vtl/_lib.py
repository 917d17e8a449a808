"""libvtl by ctypes. Its functions are documented in include/vtl.h."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
from ctypes import c_char, c_char_p, c_double, c_int, c_int32, c_size_t, c_ssize_t, c_uint32
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

INITIATOR, RESPONDER, LISTENER = 1, 2, 3

# Maximum length of a message, bytes.
MAX_MESSAGE = 64 << 20
# Maximum part of a message that is fetched at a time, bytes.
_MAX_PART = 1 << 15

Buffer = Union[bytes, bytearray, memoryview]


class Preference(enum.IntEnum):
    """How much a service, or its absence, is wanted: RFC 9622, section 6.2."""

    NONE = 0
    REQUIRE = 1
    PREFER = 2
    AVOID = 3
    PROHIBIT = 4


class Services(enum.IntFlag):
    """What a protocol provides."""

    RELIABLE = 1
    ORDERED = 2
    FLOW_CONTROL = 4
    CONGESTION_CONTROL = 8
    PARTIAL_RELIABILITY = 16
    PARTIAL_ORDER = 32
    MULTIPATH = 256
    ENCRYPTION = 512


@dataclass
class Requirements:
    """What a session shall be like.

    max_loss: packets that may be missing, percent; excludes reliability at REQUIRE.
    min_throughput: Mbit/s of payload. max_delay: milliseconds from sender to receiver.
    """

    reliability: Preference = Preference.NONE
    order: Preference = Preference.NONE
    flow_control: Preference = Preference.NONE
    congestion_control: Preference = Preference.NONE
    multipath: Preference = Preference.NONE
    encryption: Preference = Preference.NONE
    partial_order: Preference = Preference.NONE
    max_loss: Optional[float] = None
    min_throughput: Optional[float] = None
    max_delay: Optional[int] = None


class CRequirements(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reliability", c_int32),
        ("order", c_int32),
        ("flow_control", c_int32),
        ("congestion_control", c_int32),
        ("multipath", c_int32),
        ("encryption", c_int32),
        ("partial_order", c_int32),
        ("max_loss", c_double),
        ("min_throughput", c_double),
        ("max_delay", c_uint32),
        ("reserved", c_uint32),
    ]

    @classmethod
    def of(cls, wanted: Requirements) -> "CRequirements":
        names = [field[0] for field in cls._fields_[1:-1]]
        delay = wanted.max_delay or 0
        if not 0 <= delay < 1 << 32:
            raise ValueError(f"max_delay {delay} is out of range")
        values = {name: getattr(wanted, name) or 0 for name in names}
        return cls(size=ctypes.sizeof(cls), **values)


class CInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("services", c_uint32),
        ("gid", c_uint32),
        ("max_message", c_uint32),
        ("graft", c_char * 32),
        ("peer", c_char * 48),
        ("max_packet", c_uint32),
        ("reserved", c_uint32),
    ]


class CStats(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reserved", c_uint32),
        ("rtt", c_double),
        ("min_rtt", c_double),
        ("rate", c_double),
        ("loss", c_double),
        ("window", c_uint64),
        ("sent", c_uint64),
        ("retransmitted", c_uint64),
        ("lost", c_uint64),
        ("delivered", c_uint64),
        ("unacknowledged", c_uint64),
        ("received", c_uint64),
        ("duplicates", c_uint64),
        ("timeouts", c_uint64),
    ]


class CSwitches(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reserved", c_uint32),
        ("count", c_uint64),
        ("packets", c_uint64),
        ("messages", c_uint64),
        ("bytes", c_uint64),
    ]


@dataclass(frozen=True)
class Info:
    """What was negotiated."""

    graft: str
    """The protocol's name."""
    gid: int
    """The protocol's number."""
    services: Services
    """What the protocol provides."""
    peer: str
    """The other host's address."""
    max_message: int
    """The longest message, bytes: 64 MiB by protocols with reliability and order, else max_packet."""
    max_packet: int
    """What one packet carries at most, bytes; becomes less when the path takes less."""


@dataclass(frozen=True)
class Statistics:
    """What is counted of a session since it began; the first four are estimates."""

    rtt: float
    """Smoothed round-trip time, milliseconds."""
    min_rtt: float
    """The shortest round trip of the last 10 s, milliseconds."""
    rate: float
    """At which payload arrives, the highest of late, Mbit/s."""
    loss: float
    """Transmissions lost on their way of late, percent."""
    window: int
    """Packets that may be under way."""
    sent: int
    """Packets, repetitions included."""
    retransmitted: int
    """Packets sent again."""
    lost: int
    """Transmissions that have not arrived."""
    delivered: int
    """Packets that have arrived at the peer."""
    unacknowledged: int
    """Packets that the peer has not acknowledged yet."""
    received: int
    """Different packets."""
    duplicates: int
    """Packets that came again."""
    timeouts: int
    """Times that nothing came back for too long."""


@dataclass(frozen=True)
class Switches:
    """Stateless switches so far, and what this side has given up in them, at most."""

    count: int
    """Switches, whichever side has asked for them."""
    packets: int
    """Packets that the peer had not acknowledged."""
    messages: int
    """Messages that end in them; a packet of a byte stream counts as one."""
    bytes: int
    """Bytes of their payload."""


def _load() -> ctypes.CDLL:
    # The GIL is released while a function of it runs.
    lib = ctypes.CDLL(str(Path(__file__).with_name("libvtl.so")))
    sock, place = c_void_p, ctypes.POINTER(c_void_p)
    functions: list[tuple[str, Any, list[Any]]] = [
        ("vtl_init", c_int, [c_int, c_char_p, c_char_p, place]),
        ("vtl_negotiate", c_int, [sock, ctypes.POINTER(CRequirements)]),
        ("vtl_validate", c_int, [sock]),
        ("vtl_accept", c_int, [sock, place]),
        ("vtl_send_data", c_ssize_t, [sock, c_void_p, c_size_t]),
        ("vtl_recv_data", c_ssize_t, [sock, c_void_p, c_size_t]),
        ("vtl_send_in_lane", c_int, [sock, c_uint32, c_void_p, c_size_t]),
        ("vtl_recv_message", c_ssize_t, [sock, c_void_p, c_size_t]),
        ("vtl_recv_part", c_ssize_t, [sock, c_void_p, c_size_t, ctypes.POINTER(c_int)]),
        ("vtl_close", c_int, [sock]),
        ("vtl_abort", c_int, [sock]),
        ("vtl_set_stateless", c_int, [sock, c_int]),
        ("vtl_set_timeout", c_int, [sock, c_int]),
        ("vtl_fd", c_int, [sock]),
        ("vtl_get_info", c_int, [sock, ctypes.POINTER(CInfo)]),
        ("vtl_get_stats", c_int, [sock, ctypes.POINTER(CStats)]),
        ("vtl_get_switches", c_int, [sock, ctypes.POINTER(CSwitches)]),
        ("vtl_last_error", c_char_p, []),
        ("vtl_version", c_char_p, []),
    ]
    for name, result, args in functions:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, args
    return lib


LIB = _load()


def version() -> str:
    return str(LIB.vtl_version().decode())


def check(result: int) -> int:
    """The result of a call, or its failure as an exception."""
    if result >= 0:
        return result
    why = (LIB.vtl_last_error() or b"").decode() or os.strerror(-result)
    if -result == errno.EINVAL:
        raise ValueError(why)
    raise OSError(-result, why)


def waits(result: int) -> bool:
    """Whether a call would have to wait."""
    return result in (-errno.EAGAIN, -errno.ETIMEDOUT)


class Handle:
    """A socket of libvtl."""

    def __init__(self, value: int) -> None:
        self.value: Optional[int] = value

    @classmethod
    def init(cls, mode: int, src: Optional[str], dst: Optional[str]) -> "Handle":
        place = c_void_p()
        text = [None if t is None else t.encode() for t in (src, dst)]
        check(LIB.vtl_init(mode, text[0], text[1], ctypes.byref(place)))
        return cls(place.value or 0)

    def set_timeout(self, milliseconds: int) -> None:
        check(LIB.vtl_set_timeout(self.value, milliseconds))

    def fd(self) -> int:
        return check(LIB.vtl_fd(self.value))

    def negotiate(self, wanted: Optional[Requirements]) -> int:
        # ctypes passes None as NULL.
        c = None if wanted is None else ctypes.byref(CRequirements.of(wanted))
        return int(LIB.vtl_negotiate(self.value, c))

    def accept(self) -> "tuple[int, Optional[Handle]]":
        place = c_void_p()
        result = LIB.vtl_accept(self.value, ctypes.byref(place))
        return result, Handle(place.value or 0) if result >= 0 else None

    def info(self) -> Info:
        c = CInfo(size=ctypes.sizeof(CInfo))
        check(LIB.vtl_get_info(self.value, ctypes.byref(c)))
        services = Services(c.services)
        graft, peer = c.graft.decode(), c.peer.decode()
        return Info(graft, c.gid, services, peer, c.max_message, c.max_packet)

    def stats(self) -> Statistics:
        c = CStats(size=ctypes.sizeof(CStats))
        check(LIB.vtl_get_stats(self.value, ctypes.byref(c)))
        return Statistics(*(getattr(c, field[0]) for field in CStats._fields_[2:]))

    def switches(self) -> Switches:
        c = CSwitches(size=ctypes.sizeof(CSwitches))
        check(LIB.vtl_get_switches(self.value, ctypes.byref(c)))
        return Switches(c.count, c.packets, c.messages, c.bytes)

    def set_stateless(self, stateless: bool) -> None:
        check(LIB.vtl_set_stateless(self.value, stateless))

    def close(self) -> int:
        """Ends it in order; the handle stays if that would have to wait."""
        result = int(LIB.vtl_close(self.value))
        if not waits(result):
            self.value = None
        return result

    def abort(self) -> None:
        value, self.value = self.value, None
        if value is not None:
            LIB.vtl_abort(value)


class Out:
    """Bytes to be sent, of any object with a buffer; kept as they are while this lives."""

    def __init__(self, data: Buffer) -> None:
        view = memoryview(data)
        self.size = view.nbytes
        if isinstance(data, bytes):
            self._keep: object = data
            self._at = ctypes.cast(c_char_p(data), c_void_p).value or 0
        elif view.readonly or not view.c_contiguous:
            copy = view.tobytes()
            self._keep = copy
            self._at = ctypes.cast(c_char_p(copy), c_void_p).value or 0
        else:
            array = (c_char * view.nbytes).from_buffer(view)
            self._keep = array
            self._at = ctypes.addressof(array)

    def at(self, offset: int) -> int:
        return self._at + offset


def lane_of(lane: int) -> int:
    """The number of a lane, as libvtl takes it."""
    if not 0 <= lane < 1 << 32:
        raise ValueError(f"lane {lane} is out of range")
    return lane


class In:
    """A place for bytes."""

    def __init__(self, data: "bytearray | memoryview") -> None:
        view = memoryview(data)
        self.size = view.nbytes
        self.place = (c_char * view.nbytes).from_buffer(view)


class Message:
    """What has come of the message that is being received: kept when a call gives up."""

    def __init__(self) -> None:
        self._got = bytearray()
        self._more = c_int(0)
        self._buffer = bytearray()
        self._place: Optional[In] = None

    def fetch(self, handle: Handle) -> int:
        """One part of it; the result of libvtl."""
        if self._place is None:
            self._buffer = bytearray(_MAX_PART)
            self._place = In(self._buffer)
        place = self._place
        more = ctypes.byref(self._more)
        result = int(LIB.vtl_recv_part(handle.value, place.place, place.size, more))
        if result > 0:
            self._got += memoryview(self._buffer)[:result]
        elif result == -errno.ECONNABORTED:
            # A stateless switch has given up the rest of it.
            self._got.clear()
            self._more.value = 0
        return result

    def ready(self, limit: int) -> bool:
        """Whether it is whole, or too long."""
        return len(self._got) > limit or (len(self._got) > 0 and not self._more.value)

    def spill(self, buffer: Union[bytearray, memoryview]) -> int:
        """Hands out what is kept, as far as it fits, to who reads bytes; returns how many."""
        if not self._got:
            return 0
        place = memoryview(buffer).cast("B")
        size = min(len(self._got), place.nbytes)
        place[:size] = self._got[:size]
        del self._got[:size]
        return size

    def take(self, limit: int) -> bytes:
        """A message that is ready."""
        if len(self._got) > limit:
            raise OSError(errno.ENOBUFS, f"the message is longer than {limit} bytes")
        got = bytes(self._got)
        self._got = bytearray()
        return got


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
