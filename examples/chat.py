#!/usr/bin/env python3
"""A chat over partial order, with asyncio.

    chat.py serve                   at the host where they meet
    chat.py NAME ADDRESS            everybody else: says what comes on standard input, line by line

A line depends on what its speaker said before, and on nobody else's lines: so each speaker has a lane.
A speaker's lines are shown in their order, and a late line holds up nobody but its speaker.
"""

import asyncio
import json
import sys

import vtl
from vtl import Preference, Requirements

PORT = 7300
WANTED = Requirements(
    reliability=Preference.REQUIRE,
    partial_order=Preference.REQUIRE,
    order=Preference.AVOID,
    congestion_control=Preference.PREFER,
)


async def serve():
    lanes = {}  # of the speakers
    members = set()

    async def member(session):
        members.add(session)
        try:
            async with session:
                async for raw in session:
                    lane = lanes.setdefault(json.loads(raw)["who"], len(lanes))
                    await asyncio.gather(*(say(other, raw, lane) for other in list(members)))
        except (ConnectionError, json.JSONDecodeError, KeyError, TypeError):
            pass  # this one is gone, or talks nonsense
        finally:
            members.discard(session)

    async def say(other, message, lane):
        try:
            await other.send_message(message, lane)
        except OSError:
            members.discard(other)

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
            async for raw in session:
                message = json.loads(raw)
                print(f"{message['who']}: {message['text']}", flush=True)

        shown = asyncio.create_task(show())
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            message = {"who": name, "text": line.rstrip("\n")}
            await session.send_message(json.dumps(message).encode())
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
