"""A RabbitMQ with TLS, certificates of every kind by openssl, and servers that show others in its place."""

import contextlib
import socket
import socketserver
import ssl
import subprocess
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from relatum.local import LocalRabbitMQ
from tests.support._waiting import START_S
from tests.support.ports import free_port

FILES = Path(__file__).parents[1] / "contract" / "tls"
"""A certificate for localhost that signed itself, valid until 2126, and its key: for these tests only."""

KEY_PASSWORD = "opens-the-key"
"""The password of `client-locked`'s key."""


class Authority:
    """A certificate authority, and the certificates that it signs, as files of one directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self.ca = directory / f"{name}.pem"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True)

    def issue(self, name: str, *, alternative: str | None = None, days: int = 2, password: str | None = None) -> Path:
        """Make `NAME.pem` for the host `alternative`, or for a client, and its key; negative days make it expired."""
        locked = ["-aes256", "-pass", f"pass:{password}"] if password else []
        self._openssl(
            "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", f"{name}.key", *locked
        )
        unlock = ["-passin", f"pass:{password}"] if password else []
        self._openssl("req", "-new", "-key", f"{name}.key", *unlock, "-subj", f"/CN={name}", "-out", f"{name}.csr")
        extensions = self._directory / f"{name}.ext"
        usage = "serverAuth" if alternative else "clientAuth"
        names = f"\nsubjectAltName={alternative}" if alternative else ""
        extensions.write_text(f"extendedKeyUsage={usage}{names}\n")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key"),
            *("-CAcreateserial", "-days", str(days), "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
        return self._directory / f"{name}.pem"


@dataclass(frozen=True)
class Port:
    """Where a server listens over AMQP 0.9.1, and 120 below over the stream protocol."""

    amqp: int

    @property
    def stream(self) -> int:
        return self.amqp - 120


class Ending:
    """Ends TLS in front of plain ports, as a proxy that shows a certificate of its own."""

    def __init__(self, context: ssl.SSLContext, ports: dict[int, int]) -> None:
        self._servers = [
            socketserver.ThreadingTCPServer(("127.0.0.1", port), partial(_end, context, to))  # type: ignore[arg-type]
            for port, to in ports.items()
        ]
        for server in self._servers:
            server.daemon_threads, server.block_on_close = True, False
            threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


def _end(context: ssl.SSLContext, port: int, client: socket.socket, *_: object) -> None:
    with contextlib.suppress(OSError, ValueError):
        client.settimeout(90)
        secure = context.wrap_socket(client, server_side=True)
        secure.settimeout(None)
        with secure, socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=_pass_on, args=(server, secure), daemon=True)
            back.start()
            _pass_on(secure, server)
            back.join(90)


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


class TlsBroker:
    """A RabbitMQ by `plain` and `secure` ports; TLS with other certificates at `asking`, `expired`, `elsewhere`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "certificates"
        self.directory.mkdir()
        self._make_certificates()
        self.secure = Port(free_port((0, -120)))
        self.server = LocalRabbitMQ(
            directory / "rabbitmq",
            configuration=self._configuration(),
            plugins=("rabbitmq_stream", "rabbitmq_auth_mechanism_ssl"),
            start_timeout_s=START_S,
        )

    def _make_certificates(self) -> None:
        mine, other = Authority(self.directory, "authority"), Authority(self.directory, "stranger")
        mine.issue("server", alternative="DNS:localhost")
        mine.issue("expired", alternative="DNS:localhost", days=-1)
        mine.issue("elsewhere", alternative="DNS:broker.example")
        mine.issue("relatum")
        mine.issue("client-locked", password=KEY_PASSWORD)
        mine.issue("client-expired", days=-1)
        other.issue("client-strange")

    def _configuration(self) -> dict[str, str]:
        return {
            "listeners.ssl.1": f"127.0.0.1:{self.secure.amqp}",
            "stream.listeners.ssl.1": f"127.0.0.1:{self.secure.stream}",
            "stream.advertised_host": "localhost",
            "stream.advertised_tls_port": str(self.secure.stream),
            "ssl_options.cacertfile": str(self.file("authority.pem")),
            "ssl_options.certfile": str(self.file("server.pem")),
            "ssl_options.keyfile": str(self.file("server.key")),
            "ssl_options.verify": "verify_peer",
            "ssl_options.fail_if_no_peer_cert": "false",
            "ssl_cert_login_from": "common_name",
            "auth_mechanisms.1": "PLAIN",
            "auth_mechanisms.2": "EXTERNAL",
        }

    def file(self, name: str) -> Path:
        return self.directory / name

    def __enter__(self) -> "TlsBroker":
        self.server.start()
        self.plain = Port(self.server.port)
        self._endings: list[Ending] = []
        self.asking = self._end("server", asks=True)
        self.expired = self._end("expired")
        self.elsewhere = self._end("elsewhere")
        return self

    def _end(self, certificate: str, *, asks: bool = False) -> Port:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file(f"{certificate}.pem"), self.file(f"{certificate}.key"))
        if asks:
            context.load_verify_locations(self.file("authority.pem"))
            context.verify_mode = ssl.CERT_REQUIRED
        port = Port(free_port((0, -120)))
        self._endings.append(Ending(context, {port.amqp: self.plain.amqp, port.stream: self.plain.stream}))
        return port

    def __exit__(self, *_: object) -> None:
        for ending in self._endings:
            ending.close()
        self.server.stop()

    @property
    def credentials(self) -> str:
        return urlsplit(self.server.broker_url).netloc.rpartition("@")[0]

    def url(self, template: str) -> str:
        """A URL with names for `{login}`, ports (`{secure}`, `{secure_streams}`), `{ca}` and clients (`{relatum}`)."""
        ca = self.file("authority.pem")
        names = {"login": f"{self.credentials}@", "ca": f"cacertfile={ca}", "ca_file": str(ca)}
        names["strange_ca"] = f"cacertfile={self.file('stranger.pem')}"
        for port in ("plain", "secure", "asking", "expired", "elsewhere"):
            at: Port = getattr(self, port)
            names |= {port: f"localhost:{at.amqp}/", f"{port}_streams": f"localhost:{at.stream}/"}
        for client in ("relatum", "client-locked", "client-expired", "client-strange"):
            locked = f"&password={KEY_PASSWORD}" if client == "client-locked" else ""
            of_client = f"certfile={self.file(f'{client}.pem')}&keyfile={self.file(f'{client}.key')}{locked}"
            names[client.replace("-", "_")] = of_client
        return template.format(**names)

    def context(self, certificate: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.file("authority.pem"))
        if certificate is not None:
            context.load_cert_chain(self.file(f"{certificate}.pem"), self.file(f"{certificate}.key"))
        return context
