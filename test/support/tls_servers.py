"""Stores behind TLS for tests: certificates, made by the command `openssl`, and `TlsTerminator`.

A terminator is the TLS of a real store without one: a thread that decrypts and passes the bytes on to a plain server.
TLS_STORE_SERVER names a Redis or Valkey server that was built with TLS. The tests then use it in place of the
terminator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from sglang.srt.offload.store.address import Endpoint
from support.store_servers import RedisServer, free_port

TLS_STORE_SERVER = os.environ.get("TLS_STORE_SERVER", "")
_T = TypeVar("_T")
_EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]


class Certificates:
    """Two authorities that do not know each other: `ca.pem` and `other-ca.pem`. The rest is made with `sign`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("ca", "other-ca"):
            command = ["req", "-x509", *_EC, "-noenc", "-days", "30", "-subj", f"/CN={name}"]
            self._openssl(*command, "-keyout", f"{name}.key", "-out", f"{name}.pem")
        self.server = self.sign("server", "DNS:localhost,IP:127.0.0.1")
        self.client = self.sign("client", "DNS:client")

    def sign(self, name: str, hosts: str, ca: str = "ca", days: int = 30, passphrase: str = "") -> Path:
        """The certificate's path; its key lies beside it as .key. hosts: as subjectAltName."""
        locked = ["-passout", f"pass:{passphrase}"] if passphrase else ["-noenc"]
        self._openssl(
            *("req", *_EC, *locked, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        )
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={hosts}\n")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial"),
            *("-days", str(days), "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
        return self.folder / f"{name}.pem"

    def path(self, name: str) -> Path:
        return self.folder / name

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


class TlsTerminator:
    """Listens on `port` of 127.0.0.1 and passes decrypted bytes on to a plain server."""

    def __init__(self, backend: Endpoint, certificate: Path, client_ca: Path | None = None) -> None:
        """client_ca: who signs the certificates that clients must have; None: they need none."""
        self._backend = backend
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.use(certificate)
        if client_ca is not None:
            self._context.load_verify_locations(client_ca)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        # The bytes of errors that clients cause would fill the log.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(lambda: asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context))
        self._writers: set[asyncio.StreamWriter] = set()

    def use(self, certificate: Path) -> None:
        """For new connections."""
        self._context.load_cert_chain(certificate, certificate.with_suffix(".key"))

    def drop_connections(self) -> None:
        async def drop() -> None:
            for writer in self._writers:
                # Python 3.11.2 fails where the connection has ended already.
                with contextlib.suppress(AttributeError):
                    writer.transport.abort()

        self._run(drop)

    def close(self) -> None:
        async def stop_listening() -> None:
            self._server.close()

        self._run(stop_listening)
        self.drop_connections()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Callable[[], Awaitable[_T]]) -> _T:
        async def run() -> _T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        where = self._backend
        plain = (
            asyncio.open_unix_connection(where.path)
            if where.path
            else asyncio.open_connection(where.host, where.port)
        )
        plain_reader, plain_writer = await plain
        ends = {writer, plain_writer}
        self._writers |= ends
        try:
            await asyncio.gather(_pump(reader, plain_writer), _pump(plain_reader, writer))
        finally:
            self._writers -= ends


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class TlsRedisServer(RedisServer):
    """A server that speaks TLS by itself, on `tls_port`; `port` is without."""

    def __init__(self, folder: Path, certificate: Path, ca: Path, client_ca: Path | None = None) -> None:
        self.tls_port = free_port()
        super().__init__(
            folder,
            program=Path(TLS_STORE_SERVER),
            tls_port=str(self.tls_port),
            tls_cert_file=str(certificate),
            tls_key_file=str(certificate.with_suffix(".key")),
            tls_ca_cert_file=str(client_ca or ca),
            tls_auth_clients="yes" if client_ca else "no",
        )
