"""`relatum mcp`: the tools over stdin and stdout. What it needs of the extra `mcp` is imported when it runs."""

from relatum.terminal import ServerOptions, spread
from relatum_consumer.web._serving import of_extra
from relatum_consumer.web.command import Shown


@spread
def mcp(*, shown: Shown, servers: ServerOptions) -> None:
    """Serve look-ups to an agent, as tools of the Model Context Protocol over stdin and stdout; they only read.

    Logs go to stderr. Over HTTP: `relatum web --mcp`.
    """
    with of_extra("mcp"):
        import anyio

        from relatum_consumer.web import WebOptions
        from relatum_consumer.web._mcp._protocol import over_stdio
    options = WebOptions(servers.broker_url, servers.database_url, servers.stream_url, **shown.options)
    anyio.run(over_stdio, options)
