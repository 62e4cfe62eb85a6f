"""`relatum keys`: the key definitions in the database, and which streams are recorded with their times."""

from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from relatum.keys import PRESETS, KeyDefinition, KeyType, preset
from relatum.recording import set_record_time
from relatum.store.catalog import add_keys, backfill_command, key_definitions, mask_key, remove_key
from relatum.store.catalog import set_record_time as switch_record_time
from relatum.store.translation import translated_errors
from relatum_cli.options import Commands, DatabaseOptions, Json, ServerOptions, argument, option
from relatum_cli.show import Cells, answer, moment_text, note, say, show

keys = Commands()

SOURCES: Final = (
    "The source of one key's value: header:NAME, property:NAME, 'body:$.order.id' for a JSON body, "
    "'header:$.x-a.b[0]', trace-id:traceparent; 'A or B': the first that has a value. Repeat it for a composite key. "
    "By default, the header with the key's name."
)
PRESET: Final = f"Define the keys of messages that a library publishes: {', '.join(PRESETS)}."
NAMES: Final = "Each value of this key names a cause: the message whose KEY has the same value."
MASKED: Final = "Show digests instead of the key's values, on pages and to agents."

KeyName = Annotated[str, argument("The key's name.")]


@keys.command("add")
def add(
    *,
    names: list[str] | None = argument("The keys' names.", "[NAME…]", default=None),
    source: list[str] | None = option(None, SOURCES),
    key_type: KeyType = option(KeyType.TEXT, "The type of the values, by which they are compared.", "--type"),
    named: str | None = option(None, NAMES, "--names", metavar="KEY"),
    masked: bool = option(False, MASKED, "--masked"),
    presets: list[str] | None = option(None, PRESET, "--preset", metavar="LIBRARY"),
    given: DatabaseOptions,
    as_json: Json = False,
) -> None:
    """Define keys. Recorders record them from now on; `relatum backfill` records them for older messages.

    A NAME without --source is a header; if a property has the same name, a hint is printed on stderr. `--json` prints
    one document: the list of the keys as stored.
    """
    wanted = [key for name in presets or () for key in preset(name)]
    if not names and not wanted:
        raise typer.BadParameter("give a key's NAME, or --preset LIBRARY")
    if (source and len(names or ()) != 1) or (named and not names):
        raise typer.BadParameter("--source needs exactly one NAME, and --names at least one")
    sources = tuple(source) if source else None
    wanted += [KeyDefinition(name, source=sources, type=key_type, names=named) for name in names or ()]
    wanted = [replace(key, masked=masked) for key in wanted]
    with given.engine() as engine:
        stored = add_keys(engine, wanted)
    for key in wanted:
        if key.hint:
            note(f"hint: {key.hint}")
    lines = [f"{key.name}: {key.meaning}, since {moment_text(key.since)}" for key in stored]
    lines.append(f"For messages recorded before, run {backfill_command(key.name for key in stored)}")
    answer([*map(_document, stored)], *lines, as_json=as_json)


def _document(key: KeyDefinition) -> dict[str, Any]:
    return {name: getattr(key, name) for name in ("name", "type", "names", "since", "masked")} | {"source": key.sources}


@keys.command("list")
def list_keys(*, given: DatabaseOptions, as_json: Json = False) -> None:
    """List the keys in force, oldest first. `--json` prints one document, the list."""
    with given.engine() as engine, translated_errors(), engine.connect() as connection:
        found = key_definitions(connection)
    columns: Cells = {
        "key": "name",
        "from": lambda key: " + ".join(key.sources),
        "type": "type",
        "names": "names",
        "masked": lambda key: "masked" if key.masked else None,
        "since": "since",
    }
    empty = "No key is defined. `relatum keys add NAME` defines one."
    show(found, columns, as_json=as_json, document_of=_document, empty=empty)


@keys.command("remove")
def remove(*, name: KeyName, given: DatabaseOptions) -> None:
    """Remove a key: recorders and lookups no longer use it. `relatum prune` deletes its rows.

    Unmask a masked key first, with `keys mask NAME --off`: once it is removed, nothing hides its values.
    """
    with given.engine() as engine:
        remove_key(engine, name)
    say(f"{name} is no longer recorded.")


@keys.command("mask")
def mask(
    *,
    name: KeyName,
    on: bool = option(True, "Whether the key's values are masked.", "--on/--off"),
    given: DatabaseOptions,
) -> None:
    """Show digests instead of a key's values, on pages and to agents; `--off` shows the values again.

    Running pages change within two seconds.
    """
    with given.engine() as engine:
        mask_key(engine, name, on=on)
    say(f"{name} is {'masked' if on else 'no longer masked'}.")


@keys.command("time")
def time(
    *,
    stream: str = argument("The stream, or one partition."),
    on: bool = option(True, "Whether the times of the stream's messages are recorded.", "--on/--off"),
    vhost: str | None = option(None, "The stream's virtual host, if not the broker's."),
    servers: ServerOptions,
) -> None:
    """Start or stop recording the times of a stream's messages, from its next batch on.

    If the stream is not recorded yet, give `--broker`. Exits with code 6 if the broker does not have the stream.
    """
    if servers.broker_url and vhost in (None, servers.vhost):
        set_record_time(servers.broker, servers.database_url, stream, on=on)
    else:
        with servers.engine() as engine:
            switch_record_time(engine, vhost or "/", stream, on=on)
    say(f"The times of {stream} are {'recorded' if on else 'not recorded'} from now on.")
