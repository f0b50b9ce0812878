"""`StoreAddress`: the address of a store and the credentials for it, from a URL. Owns no connection; never shows the
password."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from sglang.srt.mem_cache.block_store import StoreError

DEFAULT_PORT = 6379
FORMS = (
    "redis://[user[:password]@]host[:port][/db], unix:///path/to.sock[?db=N] "
    "or redis+cluster://[user[:password]@]host[:port],host[:port]"
)


@dataclass(frozen=True, order=True)
class Endpoint:
    """One server: a host and a port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class StoreAddress:
    """endpoints: one server, or some nodes of a cluster, each of which can name the other nodes. user "": the default
    user.

    cluster: the URL names a cluster. A single server may turn out to be a node of a cluster all the same.
    """

    endpoints: tuple[Endpoint, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    cluster: bool = False

    @classmethod
    def parse(cls, url: str) -> StoreAddress:
        """Raises StoreError, a ValueError."""
        # No message quotes a part of the URL that might contain the password, or a piece of an unescaped one.
        try:
            parts = urlsplit(url.strip())
        except ValueError:
            raise StoreError(f"the store's URL cannot be read: write it as {FORMS}") from None
        if parts.scheme == "rediss":
            raise StoreError(
                "rediss:// asks for TLS, which is not spoken here: use redis:// in a network of your own, or through "
                "a TLS tunnel on this machine"
            )
        if parts.scheme not in ("redis", "redis+cluster", "unix"):
            raise StoreError(f"the store's URL has an unknown scheme, or none: write it as {FORMS}")
        if parts.fragment:
            raise StoreError("the store's URL has a '#': write %23 if it belongs to the password")
        user, password, hosts = _credentials(parts.netloc)
        query = _query(parts)
        if parts.scheme == "unix":
            if hosts or not parts.path.startswith("/"):
                raise StoreError("a Unix socket's URL has three slashes and a full path: unix:///path/to.sock")
            path = unquote(parts.path)
            return cls((Endpoint(path=path),), user, password, _number(query.get("db", "0"), "db", 1 << 16))
        if query:
            raise StoreError(f"the store's URL has ?db=, which is for unix://: write it as {FORMS}")
        endpoints = tuple(_endpoint(host) for host in hosts.split(","))
        cluster = parts.scheme == "redis+cluster" or len(endpoints) > 1
        db = _number(parts.path.strip("/") or "0", "the database after the host", 1 << 16)
        if cluster and db:
            raise StoreError(f"a cluster has the database 0 alone, not {db}: leave it out of the store's URL")
        return cls(endpoints, user, password, db, cluster)

    def __str__(self) -> str:
        """As a URL, without the password."""
        who = f"{self.user}{':***' if self.password else ''}@" if self.user or self.password else ""
        if self.endpoints[0].path:
            return f"unix://{who}{self.endpoints[0].path}{f'?db={self.db}' if self.db else ''}"
        hosts = ",".join(map(str, self.endpoints))
        return f"redis{'+cluster' if self.cluster else ''}://{who}{hosts}{f'/{self.db}' if self.db else ''}"


def _credentials(netloc: str) -> tuple[str, str, str]:
    """User, password, and the rest."""
    who, _, hosts = netloc.rpartition("@")
    user, _, password = who.partition(":")
    user, password = unquote(user), unquote(password)
    if user and not password:
        raise StoreError("the store's URL has a user and no password: write user:password@, or :password@ alone")
    return user, password, hosts


def _query(parts: SplitResult) -> dict[str, str]:
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if query.keys() - {"db"}:
        raise StoreError(
            f"the store's URL has a '?' with something else than db behind it: write it as {FORMS}, and %3F if it "
            "belongs to the password"
        )
    return query


def _endpoint(text: str) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not host or (":" in host and not bracketed):
        raise StoreError(f"the store's URL lacks a host, or its IPv6 address has no brackets: write it as {FORMS}")
    return Endpoint(host, _number(port, "the port", 1 << 16))


def _number(text: str, what: str, limit: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= limit:
        raise StoreError(f"{what} in the store's URL is no number from 0 to {limit - 1}: write it as {FORMS}")
    return int(text)
