"""`TlsTransport`: a transport over TLS, and what its errors mean to a user.

Owns the socket and its TLS state. The server's certificate is always verified, with its host name. OpenSSL decrypts a
record of at most 16 KiB and copies it to the caller's buffer; this file makes no other copy of what is received.

    start_tls(connected socket) --handshake, certificate verified--> TlsTransport
                                --ssl.SSLError--> explain --> StoreRefused, StoreLost
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence

from sglang.srt.offload.store.address import StoreAddress, TlsFiles
from sglang.srt.offload.store.failures import StoreFailure, StoreLost, StoreRefused
from sglang.srt.offload.store.transport import seconds_left, wait_for

# A TLS record has at most so many bytes. Smaller parts are joined before they are sent, or each would be a record.
_RECORD_BYTES = 16 << 10
_PASSED_AT_ONCE = 256 << 10
# For a server to take some commands. Those who wait for its replies have given up long before.
_PATIENCE_S = 600.0
# OpenSSL's verify_code (X509_V_ERR_…).
_EXPIRED = 10
_OTHER_NAME = (62, 64)
# OpenSSL's reasons, in part, for bytes that are no TLS.
_NO_TLS = (
    "WRONG_VERSION_NUMBER",
    "UNEXPECTED_MESSAGE",
    "RECORD_LAYER_FAILURE",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
)
# OpenSSL's reasons, in part, where a server does not accept a client's certificate, or the lack of one.
_CLIENT_REFUSED = (
    *("CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE", "ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE"),
    *("ALERT_CERTIFICATE_", "ALERT_UNSUPPORTED_CERTIFICATE", "ALERT_ACCESS_DENIED"),
)


class TlsTransport:
    """connection: after its handshake, and not blocking."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self.socket = connection

    def send_all(self, views: Sequence[memoryview], deadline: float) -> None:
        for view in _joined(views):
            rest = view
            while len(rest):
                try:
                    rest = rest[self.socket.send(rest) :]
                except ssl.SSLWantWriteError:
                    wait_for(self.socket, select.POLLOUT, deadline)
                except ssl.SSLWantReadError:
                    wait_for(self.socket, select.POLLIN, deadline)
                except (ssl.SSLEOFError, ConnectionError):
                    self._raise_alert()
                    raise ConnectionResetError(errno.ECONNRESET, "it closed the connection") from None

    def recv_into(self, buffers: Sequence[memoryview], deadline: float, wait_all: bool = False) -> int:
        rest = next(buffer for buffer in buffers if len(buffer))
        size = len(rest)
        while len(rest):
            seconds_left(deadline)
            try:
                count = self.socket.recv_into(rest)
            except ssl.SSLWantReadError:
                wait_for(self.socket, select.POLLIN, deadline)
                continue
            except ssl.SSLWantWriteError:
                wait_for(self.socket, select.POLLOUT, deadline)
                continue
            rest = rest[count:]
            if not (count and wait_all):
                break
        return size - len(rest)

    def as_plain_socket(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        threading.Thread(target=self._pass_on, args=(mine,), name="tls", daemon=True).start()
        return theirs

    def close(self) -> None:
        self.socket.close()

    def _pass_on(self, plain: socket.socket) -> None:
        """Decrypt and encrypt between the server and a socket of this machine, until either side ends."""
        buffer = memoryview(bytearray(_PASSED_AT_ONCE))
        poll = select.poll()
        poll.register(plain, select.POLLIN)
        poll.register(self.socket, select.POLLIN)
        try:
            with plain, self.socket:
                while True:
                    if any(fd == plain.fileno() for fd, _ in poll.poll()):
                        if not (commands := plain.recv(_PASSED_AT_ONCE)):
                            return
                        self.send_all([memoryview(commands)], time.monotonic() + _PATIENCE_S)
                    while (size := self._decrypt(buffer)) is not None:
                        if not size:
                            return
                        plain.sendall(buffer[:size])
        except OSError:
            pass  # the other side of `plain` sees its end

    def _decrypt(self, buffer: memoryview) -> int | None:
        """What has come, to the buffer; None: nothing, 0: the server has closed the connection."""
        size = 0
        while size < len(buffer):
            try:
                count = self.socket.recv_into(buffer[size:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return size or None
            except OSError:
                if not size:
                    raise
                return size
            if not count:
                return size
            size += count
        return size

    def _raise_alert(self) -> None:
        """Raise the reason, if the server sent one before it closed the connection. Its last bytes can still be
        read."""
        try:
            self.socket.recv(1)
        except (ssl.SSLEOFError, ssl.SSLWantReadError, ConnectionError):
            pass


def start_tls(connection: socket.socket, host: str, files: TlsFiles, deadline: float) -> TlsTransport:
    """host: the name that the server's certificate must have. Takes the connected socket over; closes it if this
    fails. Raises StoreRefused, ssl.SSLError and TimeoutError."""
    try:
        # The files are read for each connection, so that renewed certificates count without a restart.
        context = _context(files)
        connection.settimeout(seconds_left(deadline))
        secured = context.wrap_socket(connection, server_hostname=host, do_handshake_on_connect=False)
    except BaseException:
        connection.close()
        raise
    try:
        # Its timeout is for the whole handshake.
        secured.do_handshake()
        secured.setblocking(False)
    except BaseException:
        secured.close()
        raise
    return TlsTransport(secured)


def explain(error: ssl.SSLError, where: str, address: StoreAddress) -> StoreFailure:
    """What a failure of TLS means. where: the server, for the message."""
    files = address.tls or TlsFiles()
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            remedy = (
                "let its nodes name themselves as their certificates do (cluster-announce-hostname, and "
                "cluster-preferred-endpoint-type hostname)"
                if address.cluster
                else "write the name that the certificate has into the store's URL"
            )
            return StoreRefused(
                f"the certificate of {where} is for another host ({error.verify_message}): {remedy}, or give the "
                "server a certificate for this name"
            )
        if error.verify_code == _EXPIRED:
            return StoreRefused(f"the certificate of {where} has expired: renew it, or correct this machine's clock")
        ca = f"the CA of {files.ca}" if files.ca else "a CA that this machine trusts"
        return StoreRefused(
            f"the certificate of {where} is not signed by {ca} ({error.verify_message}): name its CA's file in the "
            "store's URL, as ?ca=/path/ca.pem"
        )
    if any(each in reason for each in _CLIENT_REFUSED):
        if files.cert:
            return StoreRefused(
                f"{where} does not accept the client certificate {files.cert} ({reason}): take one that is valid and "
                "signed by a CA that the server trusts"
            )
        what = "" if "CERTIFICATE_REQUIRED" in reason else ", or has no version of TLS in common with this client"
        return StoreRefused(
            f"{where} wants a client certificate{what} ({reason}): name certificate and key in the store's URL, as "
            "?cert=/path/client.pem&key=/path/client.key"
        )
    if any(each in reason for each in _NO_TLS):
        return StoreLost(f"{where} speaks no TLS ({reason}): {no_tls_remedy()}")
    return StoreLost(f"TLS with {where} failed: {reason}")


def no_tls_remedy() -> str:
    return "write redis:// in place of rediss://, or give the port where it speaks TLS"


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Raises StoreRefused."""
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
    except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
        raise StoreRefused(
            f"the CA's file {files.ca} cannot be read ({_reason(error)}): correct ca= in the store's URL"
        ) from None
    if files.cert:
        try:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(files.cert, files.key or None, password="")
        except (OSError, ValueError) as error:
            key = f" and its key {files.key}" if files.key else " and the key in it"
            raise StoreRefused(
                f"the client certificate {files.cert}{key} cannot be used ({_certificate_reason(error, files)}): "
                "correct cert= and key= in the store's URL; the key must have no passphrase"
            ) from None
    return context


def _certificate_reason(error: Exception, files: TlsFiles) -> str:
    """Why certificate and key were not loaded. OpenSSL gives no reason where it cannot read one of them."""
    if not isinstance(error, ssl.SSLError) or error.reason:
        return _reason(error)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(files.cert)
    except OSError:
        return "the certificate cannot be read: the file holds none in PEM form"
    return "the key cannot be read: it may be locked by a passphrase, or be no key in PEM form"


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None)
    return reason or str(error)


def _joined(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The same bytes. Parts that are smaller than a record are copied together."""
    small: list[memoryview] = []
    for view in views:
        if len(view) < _RECORD_BYTES:
            small.append(view)
            continue
        if small:
            yield memoryview(b"".join(small))
            small = []
        yield view
    if small:
        yield memoryview(b"".join(small))
