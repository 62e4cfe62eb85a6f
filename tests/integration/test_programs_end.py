"""Programs that close nothing, while a server is suspended, end anyway; and what one does at its end works."""

import subprocess
import sys
import time

import pytest

from relatum.superstreams import Layout
from tests.support import in_a_try
from tests.support.place import FailingPlace, Place

ALL_OPEN = """
import asyncio, sys, threading
import pika, relatum
from relatum.collecting import ExecutorOptions
from relatum.reading import StreamReader
from relatum.recording import Recorder
from relatum_consumer import AsyncRelations, Relations

amqp, streams, database, stream, super_stream = sys.argv[1:]
broker = relatum.Broker(amqp, stream_url=streams)
connection = pika.BlockingConnection(pika.URLParameters(amqp))
relatum.intercept(connection, database=database, keys=["order_id"], broker=broker)
channel = connection.channel()
channel.confirm_delivery()
receipt = relatum.publish(channel, "", stream, b"", pika.BasicProperties(headers={"order_id": "a"}))
receipt.wait(90)
collector = relatum.MessageCollector("billing", database=database, broker=broker, streams=[stream])
collector.register_executor("order", lambda bulk: None, ExecutorOptions())
collector.start()
consumer = relatum.SerialConsumer(super_stream, "test", database=database, broker=broker)
consumer.start()
router = relatum.ContextRouter(super_stream, database, broker=broker)
router.open()
recorder = Recorder(broker, database, [stream], keys=["order_id"])
threading.Thread(target=recorder.run, args=[threading.Event()], daemon=True).start()
reader = StreamReader.open(broker)
relations = Relations(broker, database)
assert relations.find("order_id", "a")

in_loop = AsyncRelations(broker, database)
assert asyncio.run(in_loop.find("order_id", "a"))

async def leave() -> None:
    global task
    task = asyncio.create_task(in_loop.find("order_id", "b"))
    await asyncio.sleep(0.1)

print("ready", flush=True)
sys.stdin.readline()
threading.Thread(target=relations.find, args=["order_id", "b"], daemon=True).start()
threading.Thread(target=reader.bounds, args=[stream], daemon=True).start()
asyncio.run(leave())
"""

AT_EXIT = """
import atexit, sys
import pika, relatum
from relatum_consumer import Relations

amqp, streams, database, stream = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(amqp))
relatum.intercept(connection, database=database, keys=["order_id"], broker=relatum.Broker(amqp, stream_url=streams))
channel = connection.channel()
relations = Relations(streams, database)

def put(value):
    channel.basic_publish("", stream, b"", pika.BasicProperties(headers={"order_id": value}))

def at_exit():
    put("last")
    relatum.release(connection)
    print(relations.find("order_id", "first").status.value)

atexit.register(at_exit)
put("first")
"""


def program(script: str, *arguments: str) -> "subprocess.Popen[str]":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], text=True, **pipes)


@pytest.mark.parametrize("frozen", ["database frozen", "broker frozen"])
def test_a_program_ends_that_closed_nothing(frozen: str, place: Place, layout: Layout) -> None:
    """A program that closed nothing ends within seconds while a server is frozen."""

    def ends_soon() -> bool:
        line = FailingPlace(place, "blocking")
        urls = line.amqp, line.stream_url, line.database
        with program(ALL_OPEN, *urls, place.stream, layout.super_stream) as running:
            try:
                assert running.stdin is not None
                assert running.stdout is not None
                assert running.stdout.readline() == "ready\n", running.communicate(timeout=90)
                with line.fault(frozen):
                    began = time.monotonic()
                    running.stdin.close()
                    running.wait(90)
                    took_s = time.monotonic() - began
            finally:
                running.kill()
                line.close()
        return took_s < 5.0

    in_a_try(ends_soon, 3, what="the program's end")


def test_what_a_program_does_at_its_very_end_works(place: Place) -> None:
    """Handlers of `atexit` can publish, release the connection and look up, and all is recorded."""
    running = program(AT_EXIT, place.amqp, place.stream_url, place.database, place.stream)
    assert running.communicate(timeout=120) == ("found\n", "")
    assert place.values() == ["first", "last"]
