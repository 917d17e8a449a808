"""Sessions and listeners for asyncio.

Nothing here waits in libvtl, and no thread is used: the event loop watches one descriptor of each
session. Every coroutine may be cancelled; nothing is lost by that, but after sendall() nobody
knows how much was taken.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import AsyncIterator, Callable, Optional, Type, TypeVar, Union

from . import _lib
from ._lib import LIB, Buffer, Handle, In, Info, Out, Requirements, Statistics, Switches, check
from ._lib import waits

# The shortest and the longest pause between two looks whether a peer has everything, s.
_CLOSE = (0.001, 0.05)

_Self = TypeVar("_Self", bound="_Watched")


class _Watched:
    """Calls libvtl whenever the descriptor says that it is worth it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[None]] = set()
        handle.set_timeout(0)
        # It stays the same, and is known when there is no socket any more.
        self._fd = handle.fd()

    def _wake(self) -> None:
        self._loop.remove_reader(self._fd)
        # All of them: the first may take the news of another.
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def _wait(
        self, call: Callable[[], int], forget: Optional[Callable[[], int]] = None
    ) -> int:
        """The result of a call that need not wait any more.

        `forget` tells libvtl that nobody waits for that any longer.
        """
        try:
            while waits(result := call()):
                waiter = self._loop.create_future()
                self._loop.add_reader(self._fd, self._wake)
                self._waiters.add(waiter)
                try:
                    await waiter
                finally:
                    self._waiters.discard(waiter)
                    if not self._waiters:
                        self._loop.remove_reader(self._fd)
        except BaseException:
            if forget is not None and self._handle.value is not None:
                forget()
            raise
        return check(result)

    def abort(self) -> None:
        """Ends it at once; a session's peer learns that data may be missing."""
        if self._handle.value is not None:
            self._loop.remove_reader(self._fd)
            self._handle.abort()
            self._wake()

    async def close(self) -> None:
        """Waits until the peer has everything, and ends it. Closing twice does nothing."""
        pause, longest = _CLOSE
        while self._handle.value is not None:
            result = self._handle.close()
            if not waits(result):
                self._wake()
                try:
                    check(result)
                except BrokenPipeError:
                    pass  # the peer closed first, and has everything
                return
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, longest)

    async def __aenter__(self: _Self) -> _Self:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        try:
            if kind is None:
                await self.close()
        finally:
            self.abort()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            handle.abort()


class Session(_Watched):
    """A session with a peer. Some tasks may send, in turn, while another one receives."""

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle)
        self._message = _lib.Message()
        self._sending = asyncio.Lock()

    async def send(self, data: Buffer) -> int:
        """Hands bytes over for sending; returns how many were taken: at least one of them."""
        return await self._send(Out(data), 0)

    async def _send(self, out: Out, sent: int) -> int:
        call, at, left = LIB.vtl_send_data, out.at(sent), out.size - sent
        async with self._sending:
            return await self._wait(
                lambda: call(self._handle.value, at, left),
                lambda: call(self._handle.value, None, 0),
            )

    async def sendall(self, data: Buffer) -> None:
        """Hands all bytes over for sending. They are delivered once close() returns.

        If it is cancelled nobody knows how many were taken: send() says so.
        """
        out = Out(data)
        sent = 0
        while sent < out.size:
            sent += await self._send(out, sent)

    async def recv(self, size: int) -> bytes:
        """Bytes that have arrived, `size` at most; b"" once the peer has closed the session."""
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: await self.recv_into(buffer)])

    async def recv_into(self, buffer: Union[bytearray, memoryview]) -> int:
        """As recv(), into a buffer; returns how many. What recv_message() has kept comes first."""
        if kept := self._message.spill(buffer):
            return kept
        return await self._recv(LIB.vtl_recv_data, In(buffer))

    async def _recv(self, call: Callable[..., int], place: In) -> int:
        return await self._wait(
            lambda: call(self._handle.value, place.place, place.size),
            lambda: LIB.vtl_recv_data(self._handle.value, None, 0),
        )

    async def send_message(self, message: Buffer, lane: int = 0) -> None:
        """Sends up to info().max_message bytes, which arrive together or not at all.

        Where the protocol provides partial order only, messages of a lane arrive in order, and no
        lane waits for another one.

        If it is cancelled in the middle of a message that takes more than one packet, it is to be
        called again with the same message; nothing else can be sent before.
        """
        out, number = Out(message), _lib.lane_of(lane)
        async with self._sending:
            await self._wait(
                lambda: LIB.vtl_send_in_lane(self._handle.value, number, out.at(0), out.size),
                lambda: LIB.vtl_send_data(self._handle.value, None, 0),
            )

    async def recv_message(self, limit: int = _lib.MAX_MESSAGE) -> bytes:
        """The next message; b"" once the peer has closed the session.

        What has come of it when this is cancelled is kept for the next call. A message longer than
        `limit` bytes raises OSError (ENOBUFS) and is kept, too, for a call with a larger limit.
        """
        message = self._message
        while not message.ready(limit):
            fetched = await self._wait(
                lambda: message.fetch(self._handle),
                lambda: LIB.vtl_recv_data(self._handle.value, None, 0),
            )
            if fetched == 0:
                return b""
            if not message.ready(limit):
                await asyncio.sleep(0)  # others, too, want to do something
        return message.take(limit)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Messages until the peer closes the session."""
        while message := await self.recv_message():
            yield message

    async def negotiate(
        self, requirements: Optional[Requirements] = None, stateless: bool = False
    ) -> None:
        """Has another session take the place of this one: see vtl_negotiate() in vtl.h.

        Without requirements: reliable, ordered, with congestion control. Stateless: at once, and
        what is not acknowledged is given up, if the session may lose packets: vtl_set_stateless().
        """
        async with self._sending:
            self._handle.set_stateless(stateless)
            await self._wait(
                lambda: self._handle.negotiate(requirements),
                lambda: int(LIB.vtl_send_data(self._handle.value, None, 0)),
            )

    def info(self) -> Info:
        """What was negotiated."""
        return self._handle.info()

    def stats(self) -> Statistics:
        """Counters and estimates. Asks the daemon, which takes about 0.1 ms."""
        return self._handle.stats()

    def switches(self) -> Switches:
        """Stateless switches so far, and what was given up in them."""
        return self._handle.switches()


class Listener(_Watched):
    """Waits at a VTL port for sessions: `async for session in Listener(7000)`."""

    def __init__(self, port: int) -> None:
        super().__init__(Handle.init(_lib.LISTENER, f":{port}", None))

    async def accept(self) -> Session:
        """The next session."""
        accepted: list[Handle] = []

        def call() -> int:
            result, handle = self._handle.accept()
            if handle is not None:
                accepted.append(handle)
            return result

        await self._wait(call)
        return Session(accepted[0])

    async def __aiter__(self) -> AsyncIterator[Session]:
        while True:
            yield await self.accept()


async def connect(host: str, port: int, requirements: Optional[Requirements] = None) -> Session:
    """Opens a session with the address `host`.

    Without requirements: reliable, ordered, with congestion control.
    """
    session = Session(Handle.init(_lib.INITIATOR, None, _lib.address(host, port)))
    try:
        await session._wait(lambda: session._handle.negotiate(requirements))
    except BaseException:
        session.abort()
        raise
    return session
