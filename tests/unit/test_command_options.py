"""What the command lines of contexts, affinity sets and super streams take: scripts rely on it."""

from typing import Any

import pytest
from typer.testing import CliRunner

from relatum_cli.app import app, load

SERVERS = ("--broker", "--stream-url", "--database")
BROKER = ("--broker", "--stream-url", "--json")
OF_STREAMS = ("--max-length-bytes", "--max-age", "--segment-bytes-max", "--leader-locator", "--initial-cluster-size")

TAKEN = {
    "affinity close": ("SUPER_STREAM", "NAMES?…", "--idle", *SERVERS, "--json"),
    "affinity list": ("SUPER_STREAM", "--prefix", "--partition", "--limit=1000", *SERVERS, "--json"),
    "affinity move": ("SUPER_STREAM", "NAMES?…", "--to", "--from", *SERVERS, "--json"),
    "affinity show": ("SUPER_STREAM", "NAME", *SERVERS, "--json"),
    "affinity weight": ("SUPER_STREAM", "WEIGHTS…", *SERVERS),
    "contexts abort": ("SUPER_STREAM", "MOVES…", "--reason", *SERVERS, "--json"),
    "contexts add-partition": ("SUPER_STREAM", "--count=1", "--binding-key…", *SERVERS, "--json"),
    "contexts assign": ("SUPER_STREAM", "--to!", "NAMES…", *SERVERS, "--json"),
    "contexts consolidate": ("SUPER_STREAM", "SOURCES…", "--to!", *SERVERS, "--json"),
    "contexts consumers": ("SUPER_STREAM", *SERVERS, "--json"),
    "contexts forget": ("SUPER_STREAM", "NAME", *SERVERS),
    "contexts list": ("SUPER_STREAM", "--partition", "--limit=1000", *SERVERS, "--json"),
    "contexts move": ("SUPER_STREAM", "--to!", "NAMES?…", "--file", *SERVERS, "--json"),
    "contexts moves": ("SUPER_STREAM", "--latest", *SERVERS, "--json"),
    "contexts rebalance": ("SUPER_STREAM", "OVER?…", "--dry-run", *SERVERS, "--json"),
    "contexts resume": ("SUPER_STREAM", "MOVES?…", *SERVERS, "--json"),
    "contexts retire": ("SUPER_STREAM", "PARTITION", "--delete", "--timeout-s=30.0", *SERVERS),
    "contexts show": ("SUPER_STREAM", "NAMES…", *SERVERS, "--json"),
    "contexts status": ("SUPER_STREAM", *SERVERS, "--json"),
    "contexts verify": ("SUPER_STREAM", "--header", *SERVERS, "--json"),
    "super-stream declare": ("NAME", "--partitions", "--binding-key…", *OF_STREAMS, *BROKER),
    "super-stream delete": ("NAME", "--yes", *BROKER),
    "super-stream describe": ("NAME", *BROKER),
    "super-stream route": ("NAME", "KEYS…", "--partitions", *BROKER),
}
"""By command: arguments in order (`?` optional, `…` several), options in any order (`!` needed), and defaults."""


def taken(command: Any) -> list[str]:
    found = []
    for each in command.params:
        if each.name == "help":
            continue
        is_argument = each.param_type_name == "argument"
        text = each.name.upper() if is_argument else each.opts[0]
        text += "?" * (is_argument and not each.required) + "!" * (each.required and not is_argument)
        text += "…" * (each.nargs == -1 or getattr(each, "multiple", False))
        found.append(text if each.default in (None, False, "") else f"{text}={each.default}")
    return found


def test_the_commands_take_what_they_took() -> None:
    """No command of these groups is gone or new, and each takes the same arguments and options."""
    found = {}
    for group in ("affinity", "contexts", "super-stream"):
        found |= {f"{group} {name}": taken(command) for name, command in load(group).commands.items()}
    assert found.keys() == TAKEN.keys()
    for name, wanted in TAKEN.items():
        assert sorted(found[name]) == sorted(wanted), name
        arguments = [[each for each in some if not each.startswith("-")] for some in (found[name], wanted)]
        assert arguments[0] == arguments[1], name


@pytest.mark.parametrize(
    "words",
    [
        "affinity close s",
        "affinity close s a --idle 1h",
        "affinity move s a",
        "affinity move s a --from s-0 --to s-1",
        "affinity weight s s-0=much",
        "contexts move s --to s-1",
        "contexts move s a --file - --to s-1",
        "contexts move s --file /nowhere/at/all --to s-1",
        "super-stream delete s --json",
        "forget s --origin --dry-run",
        f"trace s {'9' * 5000} --message",
    ],
)
def test_what_makes_no_sense_is_wrong_usage(words: str) -> None:
    """Code 2 before anybody is asked."""
    servers = "--broker amqp://localhost:1/ --database postgresql://localhost:1/x"
    given = words.split() + servers.split()[: 2 if words.startswith("super") else 4]
    ended = CliRunner().invoke(app, given)
    assert ended.exit_code == 2, ended.output
