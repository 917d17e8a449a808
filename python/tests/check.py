"""Uses everything that the package offers, and checks it.

check.py serve-blocking or serve-asyncio at one host echoes SESSIONS sessions; check.py ADDRESS at
the other opens them, in both ways.
"""

import asyncio
import errno
import os
import signal
import sys
import threading
import time

import vtl
from vtl import Preference, Requirements, Services

PORT = 7200
SESSIONS = 9
SIZE = 2 << 20
DATA = bytes((i * 31 + i // 251) & 0xFF for i in range(SIZE))


def raises(kind, what, *args, **named):
    try:
        what(*args, **named)
    except kind as error:
        return error
    raise AssertionError(f"{what} does not fail")


def echo(session):
    try:
        with session:
            while data := session.recv(1 << 16):
                session.sendall(data)
    except ConnectionAbortedError:
        pass  # a client that gave up


def serve():
    for _ in range(100):  # what was closed is free at once
        vtl.Listener(PORT).close()
    with vtl.Listener(PORT, timeout=0.02) as listener:
        error = raises(OSError, vtl.Listener, PORT)
        assert error.errno == errno.EADDRINUSE and str(PORT) in str(error), error
        start = time.monotonic()
        raises(TimeoutError, listener.accept)
        assert 0.015 < time.monotonic() - start < 5
        listener.settimeout(60)
        print("ready", flush=True)
        threads = []
        for _ in range(SESSIONS):
            threads.append(threading.Thread(target=echo, args=[listener.accept()]))
            threads[-1].start()
        for thread in threads:
            thread.join()


async def echo_async(session):
    try:
        async with session:
            while data := await session.recv(1 << 16):
                await session.sendall(data)
    except ConnectionAbortedError:
        pass  # a client that gave up


async def serve_async():
    async with vtl.aio.Listener(PORT) as listener:
        print("ready", flush=True)
        tasks = []
        async for session in listener:
            tasks.append(asyncio.create_task(echo_async(session)))
            if len(tasks) == SESSIONS:
                break
        await asyncio.gather(*tasks)


def blocking(host):
    wanted = Requirements(
        reliability=Preference.REQUIRE,
        order=Preference.REQUIRE,
        encryption=Preference.REQUIRE,
        max_delay=1000,
    )
    with vtl.connect(host, PORT, wanted, timeout=60) as session:
        info = session.info()
        assert info.services & Services.RELIABLE and info.services & Services.ORDERED, info
        assert info.services & Services.ENCRYPTION, info
        assert info.graft and info.peer == host and info.max_packet >= 512, info
        sender = threading.Thread(target=session.sendall, args=[memoryview(DATA)])
        sender.start()
        got = bytearray(SIZE)
        at = 0
        while at < SIZE:
            at += session.recv_into(memoryview(got)[at:])
        sender.join()
        assert got == DATA
        for message in (b"one", bytearray(b"two"), memoryview(b"_three_")[1:-1]):
            session.send_message(message)
            assert session.recv_message() == bytes(message)
        assert raises(OSError, session.send_message, b"").errno == errno.EMSGSIZE
        session.settimeout(0)
        raises(BlockingIOError, session.recv, 1)
        session.settimeout(0.03)
        raises(TimeoutError, session.recv, 1)
        stats = session.stats()
        assert stats.rtt > 0 and stats.sent >= SIZE // 1500, stats
        refused = raises(ConnectionRefusedError, session.negotiate, None, stateless=True)
        assert "reliability" in str(refused), refused
        assert session.switches().count == 0
        session.settimeout(60)
    assert raises(OSError, session.recv, 1).errno == errno.EBADF


def interrupted(host):
    """Signals reach a program that waits."""
    # Whoever started this in the background had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    session = vtl.connect(host, PORT)
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    raises(KeyboardInterrupt, session.recv, 1)
    session.close()


def refused(host):
    error = raises(ValueError, vtl.connect, host, PORT, Requirements(
        reliability=Preference.REQUIRE, max_loss=5))
    assert "reliable" in str(error) and "max_loss 5 %" in str(error), error
    error = raises(ConnectionRefusedError, vtl.connect, host, PORT + 1)
    assert host in str(error), error
    raises(ValueError, vtl.connect, "nowhere", PORT)
    raises(TimeoutError, vtl.respond, PORT, timeout=0.02)


def chosen(host):
    """Preferences decide which of the grafts it is."""
    for wanted, graft in [
        (Requirements(reliability=Preference.REQUIRE), "stream"),
        (
            Requirements(
                reliability=Preference.REQUIRE, congestion_control=Preference.PROHIBIT
            ),
            "selective-repeat",
        ),
        (
            Requirements(reliability=Preference.PREFER, congestion_control=Preference.AVOID),
            "selective-repeat",
        ),
    ]:
        with vtl.connect(host, PORT, wanted, timeout=60) as session:
            assert session.info().graft == graft, (wanted, session.info())
            session.send_message(b"x")
            assert session.recv_message() == b"x"
    for wanted, word in [
        (Requirements(multipath=Preference.REQUIRE), "multipath"),
        (
            Requirements(reliability=Preference.REQUIRE, flow_control=Preference.PROHIBIT),
            "flow-control",
        ),
    ]:
        error = raises(ConnectionRefusedError, vtl.connect, host, PORT, wanted)
        assert word in str(error), error


async def asynchronous(host):
    async with await vtl.aio.connect(host, PORT) as session:
        # One task sends and one receives: neither may take the other's wake-ups.
        async def receive():
            got = bytearray()
            while len(got) < SIZE:
                got += await session.recv(1 << 16)
            return got

        got, _ = await asyncio.gather(receive(), session.sendall(DATA))
        assert got == DATA
        # Cancelled, and nothing is lost by it; nor does anything spin afterwards.
        for _ in range(20):
            try:
                await asyncio.wait_for(session.recv(10), 0.002)
                raise AssertionError("nothing was sent")
            except asyncio.TimeoutError:
                pass
        cpu = time.process_time()
        waiting = asyncio.create_task(session.recv_message())
        await asyncio.sleep(0.3)
        assert time.process_time() - cpu < 0.1, "it waits busily"
        await session.send_message(b"message")
        assert await waiting == b"message"
        assert session.stats().received > SIZE // 1500
        assert session.info().services & Services.RELIABLE


async def full(host):
    """A sender that was cancelled while it waited for room, and a reader that goes on."""
    session = await vtl.aio.connect(host, PORT)
    try:
        await asyncio.wait_for(session.sendall(bytes(64 << 20)), 0.5)
        raise AssertionError("the echo is not read: there cannot be room for all that")
    except asyncio.TimeoutError:
        pass
    got = 0
    while got < 1 << 20:
        got += len(await session.recv(1 << 16))
    session.abort()


async def aborted(host):
    """A session that is given up while a task waits in it."""
    session = await vtl.aio.connect(host, PORT)
    await session.send_message(b"x")
    assert await session.recv_message() == b"x"
    waiting = asyncio.create_task(session.recv(1))
    await asyncio.sleep(0.01)
    session.abort()
    try:
        await waiting
        raise AssertionError("it was ended")
    except OSError as error:
        assert error.errno == errno.EBADF, error


async def together(host):
    await asyncio.gather(asynchronous(host), asynchronous(host))


def main():
    what = sys.argv[1]
    if what == "serve-blocking":
        serve()
    elif what == "serve-asyncio":
        asyncio.run(serve_async())
    else:
        refused(what)
        chosen(what)
        blocking(what)
        interrupted(what)
        asyncio.run(together(what))
        asyncio.run(full(what))
        asyncio.run(aborted(what))
    print("ok")


if __name__ == "__main__":
    main()
