"""Sessions and listeners whose calls wait."""

from __future__ import annotations

import time
import warnings
from types import TracebackType
from typing import Callable, Iterator, Optional, Type, TypeVar, Union

from . import _lib
from ._lib import LIB, Buffer, Handle, In, Info, Out, Requirements, Statistics, Switches, check
from ._lib import waits

# Interval at which calls that wait return to Python, for signals such as Ctrl-C, ms.
_SLICE = 100

_Self = TypeVar("_Self", bound="_Waiting")


class _Waiting:
    """Calls libvtl until it need not wait any more, or the time limit has passed."""

    def __init__(self, handle: Handle, timeout: Optional[float]) -> None:
        self._handle = handle
        self.settimeout(timeout)

    def settimeout(self, timeout: Optional[float]) -> None:
        """Bounds how long calls may wait, in seconds: None for ever, 0 not at all.

        A call that takes longer raises TimeoutError (with 0: BlockingIOError) and may be tried
        again, and nothing is lost; except sendall(), of which nobody knows how much was taken:
        send() says so.
        """
        if timeout is not None and timeout < 0:
            raise ValueError("a time limit is not negative")
        self._timeout = timeout
        ms = _SLICE if timeout is None else min(_SLICE, -int(-timeout * 1000 // 1))
        self._handle.set_timeout(ms)

    def gettimeout(self) -> Optional[float]:
        return self._timeout

    def fileno(self) -> int:
        """A descriptor to wait with: vtl_fd() in vtl.h."""
        return self._handle.fd()

    def _end(self) -> Optional[float]:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _wait(self, call: Callable[[], int], end: Optional[float] = None) -> int:
        end = self._end() if end is None else end
        while True:
            result = call()
            if not waits(result) or (end is not None and time.monotonic() >= end):
                return check(result)

    def abort(self) -> None:
        """Ends it at once; a session's peer learns that data may be missing."""
        self._handle.abort()

    def close(self) -> None:
        """Waits until the peer has everything, and ends it. Closing twice does nothing."""
        if self._handle.value is None:
            return
        try:
            self._wait(self._handle.close)
        except BrokenPipeError:
            pass  # the peer closed first, and has everything

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            if self._handle.value is not None:
                self.abort()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and handle.value is not None:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            handle.abort()


class Session(_Waiting):
    """A session with a peer. One thread may send while another one receives."""

    def __init__(self, handle: Handle, timeout: Optional[float]) -> None:
        super().__init__(handle, timeout)
        self._message = _lib.Message()

    def send(self, data: Buffer) -> int:
        """Hands bytes over for sending; returns how many were taken: at least one of them."""
        out = Out(data)
        return self._wait(lambda: LIB.vtl_send_data(self._handle.value, out.at(0), out.size))

    def sendall(self, data: Buffer) -> None:
        """Hands all bytes over for sending. They are delivered once close() returns."""
        out = Out(data)
        sent, end = 0, self._end()
        while sent < out.size:
            call = LIB.vtl_send_data
            at, left = out.at(sent), out.size - sent
            sent += self._wait(lambda: call(self._handle.value, at, left), end)

    def recv(self, size: int) -> bytes:
        """Bytes that have arrived, `size` at most; b"" once the peer has closed the session."""
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.recv_into(buffer)])

    def recv_into(self, buffer: Union[bytearray, memoryview]) -> int:
        """As recv(), into a buffer; returns how many. What recv_message() has kept comes first."""
        if kept := self._message.spill(buffer):
            return kept
        place = In(buffer)
        call = LIB.vtl_recv_data
        return self._wait(lambda: call(self._handle.value, place.place, place.size))

    def send_message(self, message: Buffer, lane: int = 0) -> None:
        """Sends up to info().max_message bytes, which arrive together or not at all.

        Where the protocol provides partial order only, messages of a lane arrive in order, and no
        lane waits for another one.

        A call that gives up in the middle of a message that takes more than one packet is to be
        repeated with the same message; nothing else can be sent before.
        """
        out = Out(message)
        call = LIB.vtl_send_in_lane
        number = _lib.lane_of(lane)
        self._wait(lambda: call(self._handle.value, number, out.at(0), out.size))

    def recv_message(self, limit: int = _lib.MAX_MESSAGE) -> bytes:
        """The next message; b"" once the peer has closed the session.

        What has come of it when a call gives up is kept for the next one. A message longer than
        `limit` bytes raises OSError (ENOBUFS) and is kept, too, for a call with a larger limit.
        """
        message = self._message

        def call() -> int:
            # Only libvtl's own "nothing more" has the descriptor become readable for the rest.
            while not message.ready(limit):
                if (result := message.fetch(self._handle)) <= 0:
                    return result
            return 1

        return message.take(limit) if self._wait(call) else b""

    def negotiate(
        self, requirements: Optional[Requirements] = None, stateless: bool = False
    ) -> None:
        """Has another session take the place of this one: see vtl_negotiate() in vtl.h.

        Without requirements: reliable, ordered, with congestion control. Stateless: at once, and
        what is not acknowledged is given up, if the session may lose packets: vtl_set_stateless().
        """
        self._handle.set_stateless(stateless)
        self._wait(lambda: self._handle.negotiate(requirements))

    def info(self) -> Info:
        """What was negotiated."""
        return self._handle.info()

    def stats(self) -> Statistics:
        """Counters and estimates."""
        return self._handle.stats()

    def switches(self) -> Switches:
        """Stateless switches so far, and what was given up in them."""
        return self._handle.switches()


class Listener(_Waiting):
    """Waits at a VTL port for sessions; iterate over it, or call accept()."""

    def __init__(self, port: int, timeout: Optional[float] = None) -> None:
        super().__init__(Handle.init(_lib.LISTENER, f":{port}", None), timeout)

    def accept(self) -> Session:
        """The next session; its calls wait for ever at first."""
        accepted: list[Handle] = []

        def call() -> int:
            result, handle = self._handle.accept()
            if handle is not None:
                accepted.append(handle)
            return result

        self._wait(call)
        return Session(accepted[0], None)

    def __iter__(self) -> Iterator[Session]:
        while True:
            yield self.accept()


def connect(
    host: str,
    port: int,
    requirements: Optional[Requirements] = None,
    timeout: Optional[float] = None,
) -> Session:
    """Opens a session with the address `host`.

    Without requirements: reliable, ordered, with congestion control.
    """
    session = Session(Handle.init(_lib.INITIATOR, None, _lib.address(host, port)), timeout)
    try:
        session._wait(lambda: session._handle.negotiate(requirements))
    except BaseException:
        session.abort()
        raise
    return session


def respond(port: int, timeout: Optional[float] = None) -> Session:
    """Waits at a VTL port for one session."""
    session = Session(Handle.init(_lib.RESPONDER, f":{port}", None), timeout)
    try:
        session._wait(lambda: LIB.vtl_validate(session._handle.value))
    except BaseException:
        session.abort()
        raise
    return session
