"""`relatum keys`: the key definitions in the database, and which streams record their times."""

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from relatum.keys import PRESETS, KeyDefinition, KeyType, preset
from relatum.terminal import (
    BrokerOption,
    DatabaseOption,
    JsonOption,
    StreamUrlOption,
    console,
    errors,
    print_json,
    require_database,
)

keys = typer.Typer(
    help="Define relationship keys, list and remove them.", no_args_is_help=True, rich_markup_mode="markdown"
)


def _document(key: KeyDefinition) -> dict[str, Any]:
    told = {"name": key.name, "source": key.sources, "type": str(key.type), "names": key.names, "since": key.since}
    return told | {"masked": key.masked}


def _day(moment: datetime | None) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S %Z") if moment else "–"


@keys.command("add")
def add(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="The keys' names.", show_default=False)
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="Where one key's value comes from: header:NAME, property:NAME, 'body:$.order.id' for a body of JSON, "
            "'header:$.x-a.b[0]', trace-id:traceparent; 'A or B': the first that has one. Repeat it for a composite. "
            "Left out: the header of the key's name.",
            show_default=False,
        ),
    ] = None,
    key_type: Annotated[KeyType, typer.Option("--type", help="How values compare.")] = KeyType.TEXT,
    named: Annotated[
        str | None,
        typer.Option(
            "--names",
            metavar="KEY",
            help="A value of this key names the message that has it as KEY: the one that came before.",
            show_default=False,
        ),
    ] = None,
    masked: Annotated[
        bool, typer.Option("--masked", help="Show digests of its values, and not these, to who looks at messages.")
    ] = False,
    presets: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="LIBRARY",
            help=f"Define the keys of a library's own messages: {', '.join(PRESETS)}.",
            show_default=False,
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Define keys. They are recorded from now on; `relatum backfill` records them in older messages.

    A bare NAME is a header; where a property has that name, too, a hint on stderr says so. `--json` prints one
    document: the list of the keys as stored.
    """
    from relatum.store.catalog import add_keys, backfill_command
    from relatum.store.database import as_engine

    wanted = [key for name in presets or () for key in preset(name)]
    if not names and not wanted:
        raise typer.BadParameter("name a key, or --preset a library")
    if (source and len(names or ()) != 1) or (named and not names):
        raise typer.BadParameter("--source is for one key at a time, and --names for those that are named")
    sources = tuple(source) if source else None
    wanted += [KeyDefinition(name, source=sources, type=key_type, names=named) for name in names or ()]
    wanted = [replace(key, masked=masked) for key in wanted]
    with as_engine(require_database(database)) as engine:
        stored = add_keys(engine, wanted)
    for key in wanted:
        if key.hint:
            errors.print(f"hint: {key.hint}", soft_wrap=True)
    if as_json:
        print_json([_document(key) for key in stored])
        return
    for key in stored:
        console.print(f"{key.name}: {key.meaning}, since {_day(key.since)}")
    console.print(f"Messages recorded before: {backfill_command(key.name for key in stored)}", soft_wrap=True)


@keys.command("list")
def list_keys(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the keys in force, oldest first. `--json` prints one document, the list."""
    from relatum.store.catalog import key_definitions
    from relatum.store.database import as_engine
    from relatum.store.translation import translated_errors

    with as_engine(require_database(database)) as engine, translated_errors(), engine.connect() as connection:
        found = key_definitions(connection)
    if as_json:
        print_json([_document(key) for key in found])
        return
    if not found:
        console.print("No key is defined. `relatum keys add NAME` defines one.")
        return
    table = Table("key", "from", "type", "names", "masked", "since")
    for key in found:
        is_masked = "masked" if key.masked else "–"
        table.add_row(key.name, " + ".join(key.sources), str(key.type), key.names or "–", is_masked, _day(key.since))
    console.print(table)


@keys.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="The key's name.", show_default=False)],
    database: DatabaseOption = None,
) -> None:
    """Take a key out of force: it is neither recorded nor looked up any more; `relatum prune` deletes its rows.

    One that is masked is not removed before it is `keys mask NAME --off`: nothing would hide its values.
    """
    from relatum.store.catalog import remove_key
    from relatum.store.database import as_engine

    with as_engine(require_database(database)) as engine:
        remove_key(engine, name)
    console.print(f"{name} is no longer recorded.")


@keys.command("mask")
def mask(
    name: Annotated[str, typer.Argument(help="The key's name.", show_default=False)],
    on: Annotated[bool, typer.Option("--on/--off", help="Whether its values are masked.")] = True,
    database: DatabaseOption = None,
) -> None:
    """Show digests of a key's values, and not these, to who looks at messages; `--off` shows them again.

    Pages go by it within two seconds.
    """
    from relatum.store.catalog import mask_key
    from relatum.store.database import as_engine

    with as_engine(require_database(database)) as engine:
        mask_key(engine, name, on=on)
    console.print(f"{name} is {'masked' if on else 'not masked any more'}.")


@keys.command("time")
def time(
    stream: Annotated[str, typer.Argument(help="The stream, or one partition.", show_default=False)],
    on: Annotated[bool, typer.Option("--on/--off", help="Whether the times of its messages are recorded.")] = True,
    vhost: Annotated[
        str | None, typer.Option(help="The stream's virtual host, if not the broker's.", show_default=False)
    ] = None,
    broker: BrokerOption = None,
    stream_url: StreamUrlOption = None,
    database: DatabaseOption = None,
) -> None:
    """Switch the recording of a stream's times on or off, from its next batch on.

    A stream of which nothing is recorded yet needs `--broker`, which is asked whether there is one; code 6 otherwise.
    """
    from relatum.reading import BrokerAddress
    from relatum.recording import set_record_time
    from relatum.store.catalog import set_record_time as switch_record_time
    from relatum.store.database import as_engine

    url = require_database(database)
    address = BrokerAddress.parse(broker, stream_url) if broker else None
    if address is not None and vhost in (None, address.vhost):
        set_record_time(address, url, stream, on=on)
    else:
        with as_engine(url) as engine:
            switch_record_time(engine, vhost or "/", stream, on=on)
    console.print(f"The times of {stream} are {'recorded' if on else 'not recorded'} from now on.")
