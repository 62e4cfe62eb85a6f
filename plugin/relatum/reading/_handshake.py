"""Why TLS with a broker failed: what is wrong with whose certificate, said in words, and final.

Errors of TLS lie under those of the client libraries, and some never arrive: with TLS 1.3 a server refuses a client's
certificate after the client counts the handshake as done, and what the client has sent by then makes the kernel drop
the refusal. The broker's log has it then.
"""

import ssl
from collections.abc import Iterator
from typing import Final, TypeVar

from relatum.errors import TlsRefused

_Error = TypeVar("_Error", bound=BaseException)

NESTED_ERRORS_MAX: Final = 100
"""Errors inside errors that are looked at for a cause."""

_UNKNOWN_ISSUERS: Final = frozenset({18, 19, 20, 21})
"""OpenSSL's verify codes where nobody who is trusted vouches for a certificate."""

_OTHER_NAMES: Final = frozenset({62, 63, 64})
"""OpenSSL's verify codes of a certificate for another host, e-mail or IP address."""

_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": "it asks for a client certificate, and none was given",
    "HANDSHAKE_FAILURE": "it takes no such handshake: it may ask for a client certificate, or for other ciphers",
    "UNKNOWN_CA": "it does not trust who vouches for the client certificate",
    "CERTIFICATE_EXPIRED": "the client certificate has expired",
    "CERTIFICATE_REVOKED": "the client certificate is revoked",
    "CERTIFICATE_UNKNOWN": "it does not take the client certificate",
    "BAD_CERTIFICATE": "it does not take the client certificate",
    "UNSUPPORTED_CERTIFICATE": "it does not take a client certificate of that kind",
    "ACCESS_DENIED": "it does not take the client certificate",
    "PROTOCOL_VERSION": "it speaks other versions of TLS",
    "INSUFFICIENT_SECURITY": "it asks for stronger ciphers",
    "UNRECOGNIZED_NAME": "it does not know that server name",
}
"""What a server says that refuses a handshake, by the ends of OpenSSL's reasons. Final, all of them.

Source: RFC 8446, section 6.2.
"""

_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST"})
"""OpenSSL's reasons for an answer that is none of TLS."""


def inside(error: BaseException | None, kind: type[_Error]) -> _Error | None:
    """An error of a kind that lies under a client library's own errors, or None."""
    return next((each for each in _all_inside(error) if isinstance(each, kind)), None)


def refusal_inside(error: BaseException | None, where: str) -> TlsRefused | None:
    """What an error says that TLS was refused for, wherever that lies under a client library's own errors."""
    for each in _all_inside(error):
        if isinstance(each, ssl.SSLError) and (found := _refusal(each, where)) is not None:
            return found
    return None


def _all_inside(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those inside it, as pika and aiormq keep them."""
    waiting, seen = [error], 0
    while waiting and seen < NESTED_ERRORS_MAX:
        each = waiting.pop()
        seen += 1
        if isinstance(each, BaseException):
            yield each
            parts = (each.__cause__, getattr(each, "exception", None), *getattr(each, "exceptions", ()), *each.args)
            waiting += [part for part in parts if isinstance(part, BaseException)]


def _speaks_no_tls(where: str) -> TlsRefused:
    return TlsRefused(f"{where} does not speak TLS: its port is another, or the URL amqp:// or rabbitmq-stream://.")


def _refusal(error: ssl.SSLError, where: str) -> TlsRefused | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        message = f"The certificate of {where} is not trusted: {error.verify_message.rstrip('.')}."
        if error.verify_code in _UNKNOWN_ISSUERS:
            message += " Name who vouches for it: cacertfile= in the URL, an ssl_context, or SSL_CERT_FILE."
        elif error.verify_code in _OTHER_NAMES:
            message += " Where that is the broker you mean, name it: server_name_indication= in the URL."
        return TlsRefused(message)
    reason = error.reason or ""
    if reason in _NO_TLS:
        return _speaks_no_tls(where)
    _, alert, ending = reason.partition("_ALERT_")
    if alert and ending in _ALERTS:
        return TlsRefused(f"{where} refuses TLS: {_ALERTS[ending]}.")
    return None
