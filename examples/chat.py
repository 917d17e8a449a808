#!/usr/bin/env python3
"""A chat over partial order, with asyncio.

    chat.py serve                   at the host where they meet
    chat.py NAME ADDRESS            everybody else: says what comes on standard input, line by line

What one says depends on what the same one said before, and on nobody else: so everybody's lines
are shown in their order, and one that is late holds up nobody but its speaker. Each message says
whose it is, and which; protocols that keep more order than that do no harm.
"""

import asyncio
import json
import sys

import vtl
from vtl import Preference, Requirements

PORT = 7300
WANTED = Requirements(
    reliability=Preference.REQUIRE,
    partial_order=Preference.PREFER,
    order=Preference.AVOID,
    congestion_control=Preference.PREFER,
)


class Order:
    """Hands out each speaker's messages in their order."""

    def __init__(self):
        self.next = {}
        self.early = {}

    def take(self, message):
        """The messages whose turn has come, now that this one is here."""
        who = message["who"]
        self.early[who, message["number"]] = message
        while (ready := self.early.pop((who, self.next.get(who, 0)), None)) is not None:
            self.next[who] = self.next.get(who, 0) + 1
            yield ready


async def serve():
    members = {}  # and how many messages of each speaker they were sent

    async def member(session):
        members[session] = {}
        order = Order()
        try:
            async with session:
                async for raw in session:
                    for message in order.take(json.loads(raw)):
                        await asyncio.gather(*(say(other, message) for other in list(members)))
        except (ConnectionError, json.JSONDecodeError, KeyError):
            pass  # this one is gone, or talks nonsense
        finally:
            members.pop(session, None)

    async def say(other, message):
        counts = members.get(other, {})
        number = counts.get(message["who"], 0)
        counts[message["who"]] = number + 1
        try:
            await other.send_message(json.dumps({**message, "number": number}).encode())
        except OSError:
            members.pop(other, None)

    tasks = set()
    async with vtl.aio.Listener(PORT) as listener:
        print("ready", flush=True)
        async for session in listener:
            task = asyncio.create_task(member(session))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def talk(name, host):
    async with await vtl.aio.connect(host, PORT, WANTED) as session:
        print(f"over {session.info().graft}", flush=True)

        async def show():
            order = Order()
            async for raw in session:
                for message in order.take(json.loads(raw)):
                    print(f"{message['who']}: {message['text']}", flush=True)

        shown = asyncio.create_task(show())
        loop = asyncio.get_running_loop()
        number = 0
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            message = {"who": name, "number": number, "text": line.rstrip("\n")}
            await session.send_message(json.dumps(message).encode())
            number += 1
        # Time for the last answers.
        await asyncio.sleep(1)
        shown.cancel()


def main():
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    elif len(sys.argv) == 3:
        asyncio.run(talk(*sys.argv[1:]))
    else:
        raise SystemExit(f"usage: {sys.argv[0]} serve | {sys.argv[0]} NAME ADDRESS")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise SystemExit(f"chat: {error}")
