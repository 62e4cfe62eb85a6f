"""`relatum keys`: the key definitions in the database, and the streams whose times are recorded."""

from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from relatum.keys import PRESETS, KeyDefinition, KeyType, preset
from relatum_cli.options import Commands, DatabaseOptions, Json, ServerOptions, argument, option
from relatum_cli.show import Cells, moment_text, note, print_json, say, show

keys = Commands()

SOURCES: Final = (
    "Where one key's value comes from: header:NAME, property:NAME, 'body:$.order.id' for a body of JSON, "
    "'header:$.x-a.b[0]', trace-id:traceparent; 'A or B': the first that has one. Repeat it for a composite. "
    "Left out: the header of the key's name."
)
PRESET: Final = f"Define the keys of a library's own messages: {', '.join(PRESETS)}."
NAMES: Final = "A value of this key names the message that has it as KEY: the one that came before."
MASKED: Final = "Show digests of its values in place of them to those who look at messages."

KeyName = Annotated[str, argument("The key's name.")]


@keys.command("add")
def add(
    *,
    names: list[str] | None = argument("The keys' names.", "[NAME…]", default=None),
    source: list[str] | None = option(None, SOURCES),
    key_type: KeyType = option(KeyType.TEXT, "How values compare.", "--type"),
    named: str | None = option(None, NAMES, "--names", metavar="KEY"),
    masked: bool = option(False, MASKED, "--masked"),
    presets: list[str] | None = option(None, PRESET, "--preset", metavar="LIBRARY"),
    given: DatabaseOptions,
    as_json: Json = False,
) -> None:
    """Define keys. They are recorded from now on; `relatum backfill` records them in older messages.

    A bare NAME is a header; where a property has that name, too, a hint on stderr says so. `--json` prints one
    document: the list of the keys as stored.
    """
    from relatum.store.catalog import add_keys, backfill_command

    wanted = [key for name in presets or () for key in preset(name)]
    if not names and not wanted:
        raise typer.BadParameter("name a key, or --preset a library")
    if (source and len(names or ()) != 1) or (named and not names):
        raise typer.BadParameter("--source is for one key at a time, and --names for those that are named")
    sources = tuple(source) if source else None
    wanted += [KeyDefinition(name, source=sources, type=key_type, names=named) for name in names or ()]
    wanted = [replace(key, masked=masked) for key in wanted]
    with given.engine() as engine:
        stored = add_keys(engine, wanted)
    for key in wanted:
        if key.hint:
            note(f"hint: {key.hint}")
    if as_json:
        print_json([_document(key) for key in stored])
        return
    for key in stored:
        say(f"{key.name}: {key.meaning}, since {moment_text(key.since)}")
    say(f"Messages recorded before: {backfill_command(key.name for key in stored)}")


def _document(key: KeyDefinition) -> dict[str, Any]:
    return {name: getattr(key, name) for name in ("name", "type", "names", "since", "masked")} | {"source": key.sources}


@keys.command("list")
def list_keys(*, given: DatabaseOptions, as_json: Json = False) -> None:
    """List the keys in force, oldest first. `--json` prints one document, the list."""
    from relatum.store.catalog import key_definitions
    from relatum.store.translation import translated_errors

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
    """Take a key out of force: it is neither recorded nor looked up any more; `relatum prune` deletes its rows.

    A masked key is removed only after `keys mask NAME --off`, since nothing hides its values any more.
    """
    from relatum.store.catalog import remove_key

    with given.engine() as engine:
        remove_key(engine, name)
    say(f"{name} is no longer recorded.")


@keys.command("mask")
def mask(
    *, name: KeyName, on: bool = option(True, "Whether its values are masked.", "--on/--off"), given: DatabaseOptions
) -> None:
    """Show digests of a key's values in place of them to those who look at messages; `--off` shows the values again.

    Pages follow within two seconds.
    """
    from relatum.store.catalog import mask_key

    with given.engine() as engine:
        mask_key(engine, name, on=on)
    say(f"{name} is {'masked' if on else 'not masked any more'}.")


@keys.command("time")
def time(
    *,
    stream: str = argument("The stream, or one partition."),
    on: bool = option(True, "Whether the times of its messages are recorded.", "--on/--off"),
    vhost: str | None = option(None, "The stream's virtual host, if not the broker's."),
    servers: ServerOptions,
) -> None:
    """Switch the recording of a stream's times on or off, from its next batch on.

    For a stream of which nothing is recorded yet, the broker is asked whether it exists, so `--broker` is needed; code
    6 where it does not.
    """
    from relatum.recording import set_record_time
    from relatum.store.catalog import set_record_time as switch_record_time

    if servers.broker and vhost in (None, servers.vhost):
        set_record_time(servers.broker, servers.database_url, stream, on=on)
    else:
        with servers.engine() as engine:
            switch_record_time(engine, vhost or "/", stream, on=on)
    say(f"The times of {stream} are {'recorded' if on else 'not recorded'} from now on.")
