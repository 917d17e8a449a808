"""Messages of any length.

messages.py serve at one host echoes the messages of one session; messages.py ADDRESS MOST at the
other sends some of up to MOST bytes, messages.py asyncio ADDRESS MOST likewise.
"""

import asyncio
import errno
import sys

import vtl

PORT = 7100


def pattern(size):
    block = bytes(i % 251 for i in range(251 * 256))
    return (block * (size // len(block) + 1))[:size]


def sizes(packet, longest):
    return [1, packet - 1, packet, packet + 1, 3 * packet, 1 << 20, longest]


def serve():
    print("ready", flush=True)
    with vtl.respond(PORT) as session:
        while message := session.recv_message():
            session.send_message(message)


def refused(call, *args):
    try:
        call(*args)
    except OSError as error:
        return error.errno
    raise AssertionError("it is not refused")


def blocking(host, longest):
    with vtl.connect(host, PORT, timeout=60) as session:
        info = session.info()
        assert info.max_message == 64 << 20 and info.max_packet >= 512, info
        assert refused(session.send_message, bytes(info.max_message + 1)) == errno.EMSGSIZE
        for size in sizes(info.max_packet, longest):
            data = pattern(size)
            change(session.info(), session.negotiate)
            session.send_message(data)
            if size > 1000:
                # Nothing is lost by a limit.
                assert refused(session.recv_message, 1000) == errno.ENOBUFS
            if size == 3 * info.max_packet:
                # Nor by reading bytes in between: what is left counts as a message.
                start = session.recv(700)
                assert start + session.recv_message() == data, size
                continue
            assert session.recv_message() == data, size


def wanted(control):
    require = vtl.Preference.REQUIRE
    return vtl.Requirements(reliability=require, order=require, congestion_control=control)


def change(before, negotiate):
    """To a graft without congestion control, and back."""
    with_it = before.graft == "stream"
    level = vtl.Preference.PROHIBIT if with_it else vtl.Preference.REQUIRE
    return negotiate(wanted(level))


async def asynchronous(host, longest):
    async with await vtl.aio.connect(host, PORT) as session:
        for size in sizes(session.info().max_packet, longest):
            data = pattern(size)
            before = session.info()
            await change(before, session.negotiate)
            assert session.info().graft != before.graft
            # Two tasks send in turn, a third one is cancelled over and over.
            both = asyncio.gather(session.send_message(data), session.send_message(data))
            for _ in range(2):
                while True:
                    try:
                        got = await asyncio.wait_for(session.recv_message(), 0.01)
                        break
                    except asyncio.TimeoutError:
                        pass
                assert got == data, size
            await both


def main():
    if sys.argv[1] == "serve":
        serve()
    elif sys.argv[1] == "asyncio":
        asyncio.run(asynchronous(sys.argv[2], int(sys.argv[3])))
    else:
        blocking(sys.argv[1], int(sys.argv[2]))
    print("ok")


if __name__ == "__main__":
    main()
