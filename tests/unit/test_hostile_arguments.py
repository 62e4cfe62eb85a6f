"""Whatever is given where something is public, one clear error names the argument, before anything is opened."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import celery
import pika
import pytest
import sqlalchemy as sa

import relatum
import relatum_migrations
from relatum import collecting, errors, local, recording, superstreams
from relatum import contexts as room
from relatum.collecting import ExecutorOptions
from relatum.common.checks import COUNT_MAX, SECONDS_MAX, checked_count, checked_name, checked_seconds, seconds_text
from relatum.common.waiting import Deadline
from relatum.keys import as_definitions
from relatum.reading import AsyncStreamReader, Message, Properties, StreamReader
from relatum.reading._plan import Part
from relatum.recording.embedded import EmbeddedRecorder
from relatum_consumer import AsyncRelations, Expectation, GroupConsumer, Relations

BROKER = "amqp://127.0.0.1:1"
DATABASE = "postgresql://127.0.0.1:1/x"
"""Nobody listens there; nothing that is refused gets so far."""

HALF = "\ud800"
NUL = "a\0b"

ENGINE = sa.create_engine("sqlite://")

NAMES: list[Any] = [True, 1.5, math.nan, -1, 2**63, b"x", "", NUL, HALF, [], object()]
COUNTS: list[Any] = ["1", True, 1.5, math.nan, math.inf, -1, b"x", "", NUL, HALF, "x" * 10_000, [], object()]
OFFSETS: list[Any] = [each for each in COUNTS if each != -1]
SECONDS: list[Any] = ["1", True, math.nan, math.inf, -1, 2**63, b"x", "", NUL, HALF, "x" * 10_000, [], object()]
URLS: list[Any] = ["1", True, 1.5, -1, b"x", "", NUL, HALF, "x" * 10_000, [], "http://host", ENGINE]
LISTS: list[Any] = ["orders", True, 1.5, -1, b"x", "", HALF, object(), *([each] for each in NAMES)]
WEIGHTS: list[Any] = ["1", True, 1.5, b"x", object(), *({"s-0": each} for each in ("1", True, math.nan, math.inf, -1))]
OTHERS: list[Any] = ["1", True, 1.5, -1, b"x", "", HALF, object()]
CHOICES: list[Any] = ["1", True, 1.5, math.nan, -1, b"x", "", NUL, HALF, "x" * 10_000, [], object()]

TAKES = {"moment": ["message"], "since": ["moment"], "until": ["moment"], "binding_keys": ["partition", "stream"]}
TAKES |= {"database": ["postgresql"], "partitions": ["layout"]}
"""What errors say that an argument takes, where they do not name it."""

TOKENS = ["orders-0", "[]", "{}", '[2,"orders",0,"orders-0","0"]', '[1,"orders","0",1,2]', "7"]
"""Text that no handle gave."""

Call = Callable[[Any], Any]
CASES: dict[str, tuple[Call, list[Any]]] = {}
"""By the callable and, behind the colon, the argument: what calls it with a value, and the values it must refuse."""


def take(what: str, function: Callable[..., Any], given: dict[str, Any], **refused: list[Any]) -> None:
    for argument, values in refused.items():

        def call(value: Any, argument: str = argument) -> Any:
            return function(**(given | {argument: value}))

        CASES[f"{what}:{argument}"] = (call, values)


def readers() -> None:
    for kind in (StreamReader, AsyncStreamReader):
        reader: Any = kind(BROKER)
        name = kind.__name__
        take(f"{name}.read", reader.read, {"stream": "s", "offset": 1}, stream=[*NAMES, None], offset=[*OFFSETS, None])
        take(f"{name}.read_many", reader.read_many, {"ids": []}, ids=[*OTHERS, None], window=COUNTS)
        take(f"{name}.read_all", reader.read_all, {}, ids=[*OTHERS, None])
        scan = {"stream": "s", "start": 0}
        take(f"{name}.iterate", reader.iterate, scan, stream=NAMES, start=[*COUNTS, 2**63, None], stop=COUNTS)
        take(f"{name}.iterate", reader.iterate, scan | {"follow": True}, idle_timeout_s=SECONDS)
        take(f"{name}.batches", reader.batches, scan, stream=NAMES, start=COUNTS, stop=COUNTS, credit=COUNTS)
        take(f"{name}.batches", reader.batches, scan, idle_s=[*SECONDS, None])
        take(f"{name}.scan", reader.scan, scan | {"stop": 1, "take": bool}, stream=NAMES, start=COUNTS, stop=COUNTS)
        take(f"{name}.bounds", reader.bounds, {}, stream=NAMES)
        take(f"{name}.missing", reader.missing, {}, streams=LISTS)
        take(f"{name}.partitions", reader.partitions, {}, super_stream=NAMES)
        take(f"{name}.bound", reader.bound, {}, exchange=NAMES)
        texts = [each for each in NAMES if each != ""]
        routes = {"exchange": "", "routing_key": ""}
        take(f"{name}.routes", reader.routes, routes, exchange=texts, routing_key=texts)
        take(f"{name}.open", kind.open, {"broker": BROKER}, timeout_s=SECONDS, heartbeat_s=COUNTS)
        take(f"{name}.open", kind.open, {"broker": BROKER}, broker_connections_max=[*COUNTS, 0, 1])
    delivery = {"stream": "s", "offset": 1, "properties": pika.BasicProperties(), "body": b""}
    take("Message.from_amqp", Message.from_amqp, delivery, stream=NAMES, offset=OFFSETS, properties=OTHERS)
    take("Message.from_amqp", Message.from_amqp, delivery, body=[None, "x", 1, [], object()])
    take("Broker", relatum.Broker, {"url": BROKER}, url=URLS, stream_url=URLS, auth_mechanism=CHOICES)
    take("Broker", relatum.Broker, {"url": BROKER}, password=[True, 1.5, b"x", NUL, HALF, [], object()])
    take("Broker", relatum.Broker, {"url": "amqps://h"}, ssl_context=OTHERS)


def recorders(directory: Path) -> None:
    both = {"broker": BROKER, "database": DATABASE}
    recorder = both | {"streams": ["s"]}
    take("Recorder", recording.Recorder, recorder, broker=URLS, database=URLS, streams=[*LISTS, []])
    take("Recorder", recording.Recorder, recorder, holder=NAMES, database_connections_max=COUNTS, lease_s=SECONDS)
    take("Recorder", recording.Recorder, recorder, keys=LISTS)
    take("EmbeddedRecorder", EmbeddedRecorder, both, broker=OTHERS, database=URLS)
    take("prune", recording.prune, both, broker=URLS, database=URLS, names=LISTS, batch_rows=COUNTS)
    take("status", recording.status, both, broker=URLS, database=URLS, names=LISTS)
    stream = both | {"stream": "s"}
    take("backfill", recording.backfill, stream, broker=URLS, database=URLS, stream=NAMES, keys=LISTS)
    take("backfill", recording.backfill, stream, super_stream=NAMES)
    take("verify", recording.verify, recorder, broker=URLS, database=URLS, streams=LISTS)
    shares = ["1", True, math.nan, math.inf, -1, 2**63, b"x", [], object()]
    take("verify", recording.verify, recorder | {"sample": 0.5}, sample=shares, seed=[*OFFSETS, 2**63])
    take("repair", recording.repair, {"report": None, "database": DATABASE}, report=[None, *OTHERS])
    forget = {"database": DATABASE, "names": ["s"]}
    upgrade = {"database": DATABASE}
    take("upgrade", relatum_migrations.upgrade, upgrade, database=URLS, lock_timeout_s=[*SECONDS, 0, 0.0001])
    take("forget", recording.forget, forget, database=URLS, names=LISTS, vhost=NAMES, batch_rows=COUNTS)
    times = both | {"name": "s", "on": True}
    take("set_record_time", recording.set_record_time, times, broker=URLS, database=URLS, name=NAMES)
    take("as_definitions", as_definitions, {}, keys=LISTS)
    sources = [True, 1.5, b"x", "", HALF, [], object()]
    take("KeyDefinition", relatum.KeyDefinition, {"name": "k"}, names=[7, "", "k"])
    take("KeyDefinition", relatum.KeyDefinition, {"name": "k"}, name=NAMES, type=CHOICES, since=OTHERS, source=sources)
    app = {"connection": celery.Celery(set_as_current=False)}
    lists = [each for each in LISTS if each != "orders"]
    take("intercept", relatum.intercept, app, database=URLS, recorder=CHOICES, on_invalid=CHOICES, streams=lists)
    take("intercept", relatum.intercept, app, broker=URLS, confirm_timeout_s=[*SECONDS, 0])
    take("intercept", relatum.intercept, {}, connection=[None, *OTHERS])
    for kind in (local.LocalPostgreSQL, local.LocalRabbitMQ, local.LocalServers):
        where = {"directory": directory}
        take(kind.__name__, kind, where, directory=[None, *NAMES], start_timeout_s=[*SECONDS, 0, None])


def collectors() -> None:
    for kind in (relatum.MessageCollector, relatum.AsyncMessageCollector):
        name, given = kind.__name__, {"name": "c", "database": DATABASE, "broker": BROKER}
        take(name, kind, given, name=[*NAMES, "x" * 256], database=URLS, broker=URLS, streams=LISTS)
        take(name, kind, given, start=COUNTS, bytes_max=[*COUNTS, 0], bulks_max=[*COUNTS, 0], dead_letter_stream=NAMES)
        take(name, kind, given, type_of=OTHERS, lease_s=[*SECONDS, 0, 0.999, 10**12], keep_s=[*COUNTS, 0, 10**12])

        def register(kind: Any = kind, **given: Any) -> Any:
            return kind("c", database=DATABASE).register_executor(**given)

        executor = {"type": "t", "executor": print}
        take(f"{name}.register_executor", register, executor, type=NAMES, executor=OTHERS, options=OTHERS)
        collector: Any = kind("c", database=DATABASE)
        told, of = f"{name}.register_result_handler", {"handler": print}
        take(told, collector.register_result_handler, of, handler=[None], type=[""], message_id=["", 5])
        take(f"{told} of two", collector.register_result_handler, of | {"message_id": "m"}, type=["a"])
        take(f"{name}.close", collector.close, {}, timeout_s=[*SECONDS, None])
        take(f"{name}.flush", collector.flush, {}, type=NAMES)
        take(f"{name}.outcome", collector.outcome, {}, message_id=NAMES)
        take(f"{name}.run", collector.run, {}, stop=[None, *OTHERS])
    for option in ("bulk_bytes", "bulk_messages", "workers", "queue_bulks", "attempts"):
        take("ExecutorOptions", ExecutorOptions, {}, **{option: [*COUNTS, 0]})
    take("ExecutorOptions of many", ExecutorOptions, {}, attempts=[1001])
    take("ExecutorOptions", ExecutorOptions, {}, max_age_s=[*SECONDS, 0, 10**12], idle_s=[*SECONDS, 0])
    take("ExecutorOptions", ExecutorOptions, {}, backoff_s=SECONDS, when_full=CHOICES, joins_transaction=["yes"])
    for outcomes in (relatum.Outcomes, relatum.AsyncOutcomes):
        name, asked = outcomes.__name__, outcomes(DATABASE)
        ids = [each for each in NAMES if not isinstance(each, str) or not each]  # other text is an unknown id
        take(name, outcomes, {}, database=[None, *URLS])
        take(f"{name}.of", asked.of, {"message_id": "m"}, message_id=ids, collector=NAMES)
        wait = {"message_id": "m", "timeout_s": 1}
        take(f"{name}.wait", asked.wait, wait, message_id=ids, timeout_s=[*SECONDS, None], collector=NAMES)
    status = {"database": DATABASE}
    take("collector_status", collecting.collector_status, status, database=URLS, names=LISTS, broker=OTHERS)


def placements() -> None:
    given = {"super_stream": "s", "database": DATABASE}
    for kind in (relatum.SerialConsumer, relatum.AsyncSerialConsumer):
        name, consumer = kind.__name__, given | {"name": "c", "broker": BROKER}
        take(name, kind, consumer, super_stream=NAMES, name=NAMES, database=URLS, broker=URLS, options=OTHERS)
    serial = room.SerialOptions
    take("SerialOptions", serial, {}, start=CHOICES, header=NAMES, lease_s=[*SECONDS, 0.5], batch_s=SECONDS)
    take("SerialOptions", serial, {}, batch_messages=[*COUNTS, 0], batch_bytes=COUNTS)
    take("SerialOptions", serial, {}, held_messages_max=COUNTS, held_bytes_max=COUNTS)
    take("ContextOptions", room.ContextOptions, {}, contexts_max=[*COUNTS, 0], when_database_away=[*CHOICES, "known"])
    sets_options = room.AffinityOptions
    take("AffinityOptions", sets_options, {}, idle_s=[*SECONDS, 59.9], open_sets_max=[*COUNTS, 0])
    take("AffinityOptions", sets_options, {}, known_sets_max=[*COUNTS, 0], predecessors_max=COUNTS)
    take("AffinityOptions", sets_options, {}, when_database_away=CHOICES)
    for options in (room.ContextOptions, sets_options):
        take(options.__name__, options, {}, balance=CHOICES, trust_clock=[0, 1, None, "no"])
        take(options.__name__, options, {}, header=NAMES, timeout_s=SECONDS)
    for router, other in (
        (relatum.ContextRouter, sets_options),
        (relatum.AsyncContextRouter, sets_options),
        (relatum.AffinityRouter, room.ContextOptions),
        (relatum.AsyncAffinityRouter, room.ContextOptions),
    ):
        take(router.__name__, router, given, database=URLS, broker=URLS, options=[*OTHERS, other()])
        take(router.__name__, router, given, super_stream=[*NAMES, None, "a\nb"])
        take(f"{router.__name__}.check", object.__new__(router).check, {}, timeout_s=SECONDS)
    contexts: Any = object.__new__(relatum.SerializationContexts)
    take("SerializationContexts", relatum.SerializationContexts, given, super_stream=NAMES, database=URLS, broker=URLS)
    take("SerializationContexts", relatum.SerializationContexts, given, vhost=NAMES, header=NAMES)
    take("SerializationContexts", relatum.SerializationContexts, given, moves_at_once=COUNTS, retry_s=SECONDS)
    several = [each for each in LISTS if not isinstance(each, str)]
    take("assign", contexts.assign, {"contexts": "c", "partition": "p"}, contexts=several)
    take("assignment_of", contexts.assignment_of, {}, context=NAMES)
    take("move", contexts.move, {"contexts": "c", "to": "p"}, contexts=several, to=NAMES)
    take("consolidate", contexts.consolidate, {"sources": "a", "target": "b"}, sources=several, target=NAMES)
    take("moves", contexts.moves, {}, latest=COUNTS)
    take("plan", contexts.plan, {}, partitions=LISTS)
    take("rebalance", contexts.rebalance, {}, plan=OTHERS)
    take("resume", contexts.resume, {}, move_id=[*COUNTS, 2**63])
    take("abort", contexts.abort, {"move_id": 1}, move_id=COUNTS, reason=[True, 1.5, b"x", NUL, HALF])
    take("add_partitions", contexts.add_partitions, {}, count=COUNTS, binding_keys=LISTS)
    take("retire", contexts.retire, {"partition": "p"}, partition=NAMES, timeout_s=[*SECONDS, None])
    sets: Any = object.__new__(relatum.AffinitySets)
    take("AffinitySets", relatum.AffinitySets, given, super_stream=NAMES, database=URLS, broker=URLS)
    take("AffinitySets.list", sets.list, {}, prefix=[True, b"x", NUL, HALF], partition=NAMES, limit=COUNTS)
    take("AffinitySets.inspect", sets.inspect, {}, name=NAMES)
    take("AffinitySets.close_set", sets.close_set, {}, name=NAMES)
    take("AffinitySets.close_idle", sets.close_idle, {}, idle_s=[*SECONDS, 0, None])
    take("AffinitySets.set_idle", sets.set_idle, {}, idle_s=[*SECONDS, 0])
    take("AffinitySets.set_weights", sets.set_weights, {}, weights=[None, *WEIGHTS])
    take("AffinitySets.move", sets.move, {"names": ["a"], "to": "p"}, names=LISTS, to=NAMES)
    consumer = {"super_stream": "s", "name": "c", "database": DATABASE}
    take("forget_consumer", room.forget_consumer, consumer, super_stream=NAMES, name=NAMES, vhost=NAMES)
    reading = {"super_stream": "s", "broker": BROKER}
    take("serial.verify", room.verify, reading, super_stream=NAMES, broker=URLS, header=NAMES)
    take("consumers", room.consumers, reading | {"database": DATABASE}, super_stream=NAMES, broker=URLS)


def super_streams() -> None:
    stream = relatum.SuperStream("s", partitions=2)
    routes = [True, 1.5, b"x", "", NUL, HALF, [], object()]
    counts = [*COUNTS, 2**63]
    long = [*NAMES, None, "x" * 256, "a\nb", "\r"]
    partitions, keys = [*counts, 0, 1_001], [*LISTS, [], ["a", "a"], ["a", ""], ["a\rb"]]
    take("SuperStream", relatum.SuperStream, {"name": "s"}, name=long, route_by=routes, partitions=counts)
    others = superstreams.Layout.numbered("invoices", 2)
    take("SuperStream of others", relatum.SuperStream, {"name": "s"}, broker=URLS, partitions=[others])
    take("SuperStream.partition_of", stream.partition_of, {"broker": BROKER}, key=[None, True, 1.5, HALF, [], object()])
    take("SuperStream.affinity", stream.affinity, {}, balance=CHOICES, name=[True, b"x", NUL, HALF], weights=WEIGHTS)
    handle = {"super_stream": stream}
    take("AffinityHandle", relatum.AffinityHandle, handle, super_stream=[None, *OTHERS], partition=OTHERS)
    take("from_token", relatum.AffinityHandle.from_token, {}, token=[None, *NAMES, "x" * 10_000, *TOKENS])
    named = {"broker": BROKER, "name": "s"}
    take("declare_super_stream", superstreams.declare_super_stream, named, name=[*long, "x" * 254])
    take("declare_super_stream", superstreams.declare_super_stream, named, partitions=partitions, options=OTHERS)
    take("declare_super_stream", superstreams.declare_super_stream, named, binding_keys=keys)
    two = named | {"partitions": 2}
    take("declare_super_stream of two", superstreams.declare_super_stream, two, binding_keys=[["a"], ["a", "b", "c"]])
    take("add_partition", superstreams.add_partition, named, name=long, binding_key=NAMES, options=OTHERS)
    take("describe_super_stream", superstreams.describe_super_stream, named, name=long)
    take("delete_super_stream", superstreams.delete_super_stream, named, name=long)
    take("unbind_partition", superstreams.unbind_partition, named | {"stream": "s-0"}, name=long, stream=long)
    for option in ("max_length_bytes", "segment_bytes_max", "initial_cluster_size"):
        take("StreamOptions", superstreams.StreamOptions, {}, **{option: [*counts, 0]})
    take("StreamOptions", superstreams.StreamOptions, {}, max_age=OTHERS, leader_locator=[True, b"x", NUL, HALF])


def lookups() -> None:
    message = Message("s", 1, None, None, lambda: ({"relatum_time": 5}, Properties(), b"", True))
    several = [each for each in NAMES if each != []]
    for kind in (Relations, AsyncRelations):
        name, given = kind.__name__, {"broker": BROKER, "database": DATABASE}
        take(name, kind, given, broker=URLS, database=URLS, timeout_s=[*SECONDS, 1e300])
        take(name, kind, given, broker_connections_max=COUNTS, database_connections_max=COUNTS)
        relations: Any = kind(**given)
        of_message, by_key = {"message": message}, {"key": "k", "value": 1}
        limits, times = [*COUNTS, 0, 2**63], [each for each in OTHERS if each not in ("1", 1.5, -1)]
        for method, more in (("related", {}), ("wait_related", {"timeout_s": 1})):
            call, needed = getattr(relations, method), of_message | more
            take(f"{name}.{method}", call, needed, message=[None, *OTHERS], to=NAMES, limit=limits, order=CHOICES)
        take(f"{name}.find", relations.find, by_key, streams=NAMES, limit=limits, order=CHOICES)
        take(f"{name}.find", relations.find, by_key, since=times, until=times)
        take(f"{name}.wait_related", relations.wait_related, of_message, timeout_s=[*SECONDS, 1e300])
        for method in ("after", "before", "nearest", "window"):
            call, near = getattr(relations, method), {"moment": message, "stream": "s"}
            take(f"{name}.{method}", call, near, moment=[None, *OTHERS], stream=several)
        take(f"{name}.after", relations.after, {"moment": datetime.now(UTC), "stream": "s"}, by=["host"])
        take(f"{name}.window", relations.window, near, before_s=SECONDS[:5], after_s=SECONDS[:5])
        take(f"{name}.around", relations.around, {"moment": message}, streams=NAMES, before_s=SECONDS[:5])
        take(f"{name}.around", relations.around, {"moment": message}, limit=limits)
        trace = {"start": ("k", 1)}
        take(f"{name}.trace", relations.trace, trace, hops=limits, limit=limits, fan_out=[*limits, 10_001])
        prefixes = [None, "a\0", "\udc80", "é" * 513]
        take(f"{name}.values", relations.values, {"key": "k"}, prefix=prefixes, limit=[*limits, 1_001])
        missing = {"expectation": Expectation("x", "a", "b", "c", 1)}
        take(f"{name}.missing", relations.missing, missing, limit=limits, since=times, until=times)
        take(f"{name}.groups", relations.groups, {}, idle_timeout_s=[*SECONDS, 1e300])
        take(f"{name}.incomplete_groups", relations.incomplete_groups, {}, older_than=[*SECONDS, 1e300])
        take(f"{name}.group", relations.group, {"group_id": "0" * 48}, streams=several)
        take(f"{name}.group_position", relations.group_position, {"group_id": "0" * 48}, streams=several)
    target = {"exchange": "", "routing_key": "orders"}
    take("MessageGroup", relatum.MessageGroup, target, channel=[None, "orders", 5])
    take("AsyncMessageGroup", relatum.AsyncMessageGroup, {}, target=[None, "orders", 5])
    take("publish", relatum.publish, target | {"body": b""}, channel=[None, "orders", 5])
    take("GroupConsumer", GroupConsumer, {"name": "c"}, prefetch=[*COUNTS, 0], deliveries_max=[*COUNTS, 0])
    take("GroupConsumer", GroupConsumer, {"name": "c"}, lease_s=[*SECONDS, 1e300])
    expected = {"name": "x", "of": "a", "by": "b", "follows": "c", "within_s": 1}
    take("Expectation", Expectation, expected, within_s=[0, *SECONDS], grace_s=[None, 86_401, *SECONDS])


readers()
lookups()
recorders(Path("nowhere"))
collectors()
placements()
super_streams()


def finished(result: Any) -> Any:
    """What a call gives, with all that it would do later: of an iteration its first element."""

    async def of_async() -> Any:
        return await (anext(result) if inspect.isasyncgen(result) else result)

    if inspect.iscoroutine(result) or inspect.isasyncgen(result):
        return asyncio.run(of_async())
    return next(result, None) if isinstance(result, Iterator) else result


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_meant_is_refused_by_its_name(case: str) -> None:
    """It is an error of ours, of one line that names the argument, and nothing was asked of any server."""
    call, values = CASES[case]
    argument = case.partition(":")[2]
    words = [word.rstrip("s") for word in (*argument.split("_"), *TAKES.get(argument, [])) if word != "s"]
    for value in values:
        with pytest.raises((errors.InvalidInput, errors.ConfigurationError)) as caught:
            finished(call(value))
        said = str(caught.value)
        assert any(word in said.lower() for word in words), (value, said)
        assert "\n" not in said
        assert len(said) < 400
        said.encode()


@pytest.mark.parametrize(
    "ids", [[value] for value in (*OTHERS, ("s",), (1, 1), (None, 1), ("s", "1"), ([], 1), ("", 1))]
)
def test_ids_are_pairs(ids: Any) -> None:
    """What is not a pair of a name and an offset is refused, before a connection is taken for it."""
    with pytest.raises(errors.InvalidInput):
        Part(ids)


@pytest.mark.parametrize(
    ("check", "argument", "said", "values"),
    [
        (checked_count, "limit", "^limit= takes", [*COUNTS, 0, 1.0, None, 2**31, 2**63 - 1, 2**63, 10**5000]),
        (checked_seconds, "timeout_s", "^timeout_s= takes seconds", [*SECONDS, -0.1, -math.inf, None, 1e300, 10**5000]),
        (checked_name, "stream", "^stream= takes a name", [*NAMES, 7, None, ["orders"], "é" * 128]),
    ],
)
def test_what_is_no_count_no_time_and_no_name(
    check: Callable[[str, Any], Any], argument: str, said: str, values: list[Any]
) -> None:
    """It is refused by its argument's name, in a line that any terminal can show, and never whole."""
    for value in values:
        with pytest.raises(errors.InvalidInput, match=said) as caught:
            check(argument, value)
        assert len(str(caught.value).encode()) < 400, value


def test_the_ends_of_what_can_be_given() -> None:
    """The least and the most are taken."""
    assert [checked_count("limit", each) for each in (1, COUNT_MAX)] == [1, COUNT_MAX]
    assert [checked_seconds("timeout_s", each) for each in (0, 0.5, SECONDS_MAX)] == [0, 0.5, SECONDS_MAX]
    assert checked_seconds("before_s", 1e300, most=math.inf) == 1e300
    for name in ("bestellungen-ä\U0001f600", "é" * 127):
        assert checked_name("stream", name) == name


def test_errors_show_seconds_as_people_say_them() -> None:
    """No more digits than anybody reads, no zeros behind a point; so does a call whose time is over."""
    shown = {0: "0 s", 0.05: "0.05 s", 0.5: "0.5 s", 1: "1 s", 2.3791: "2.4 s", 10.0: "10 s", 12.6: "13 s"}
    assert {seconds: seconds_text(seconds) for seconds in shown} == shown
    assert seconds_text(86_400) == "86,400 s"
    assert [str(Deadline(10.0)), str(Deadline(None, Deadline(2.3791)))] == ["10 s", "2.4 s"]
