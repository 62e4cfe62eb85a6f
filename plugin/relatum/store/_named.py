"""How a database is named where a person reads it: in the log."""

import sqlalchemy as sa


def database_name(engine: sa.Engine) -> str:
    """The host, port and name of a database as its URL has them, without user and password."""
    url = engine.url
    in_query = url.query.get("host", ())
    hosts = [in_query] if isinstance(in_query, str) else list(in_query)
    host = url.host or ",".join(hosts)
    port = f":{url.port}" if url.port is not None else ""
    return f"{host}{port}/{url.database or ''}"
