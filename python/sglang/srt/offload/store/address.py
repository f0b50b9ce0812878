"""`StoreAddress`: the address of a store, the credentials and the files of certificates for it, from a URL. Owns no
connection; never shows the password."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode

from sglang.srt.mem_cache.block_store import StoreError

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
FORMS = (
    "redis://[user[:password]@]host[:port][/db], unix:///path/to.sock[?db=N], "
    "redis+cluster://[user[:password]@]host[:port],host[:port] "
    "or redis+sentinel://[user[:password]@]host[:port],host[:port]/master-name[/db], "
    "with rediss in place of redis for TLS"
)
_TLS_QUERY = ("ca", "cert", "key")
# The parts of a URL (RFC 3986, appendix B).
_URL = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?")


@dataclass(frozen=True, order=True)
class Endpoint:
    """One server: a host and a port, or the path of a Unix socket, or the name of a master that sentinels know."""

    host: str = ""
    port: int = 0
    path: str = ""
    master: str = ""

    def __str__(self) -> str:
        if self.master:
            return f"master {self.master}"
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files; "": none."""

    # The authorities that may sign the server's certificate. "": those that this machine trusts.
    ca: str = ""
    # This client's certificate, for a server that wants one.
    cert: str = ""
    # The key of cert. "": it stands in cert's file.
    key: str = ""


@dataclass(frozen=True)
class StoreAddress:
    """endpoints: one server, or some nodes of a cluster, each of which can name the other nodes. user "": the default
    user.

    cluster: the URL names a cluster. A single server may turn out to be a node of a cluster all the same.
    sentinels: the servers that know where the master in endpoints is; () if it is no master's name.
    tls: None: without TLS.
    """

    endpoints: tuple[Endpoint, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    cluster: bool = False
    sentinels: tuple[Endpoint, ...] = ()
    tls: TlsFiles | None = None

    @classmethod
    def parse(cls, url: str) -> StoreAddress:
        """Raises StoreError, a ValueError."""
        # No message quotes a part of the URL that might contain the password, or a piece of an unescaped one.
        parts = _split(url.strip())
        scheme, _, kind = parts.scheme.partition("+")
        if parts.scheme != "unix" and (scheme not in ("redis", "rediss") or kind not in ("", "cluster", "sentinel")):
            raise StoreError(f"the store's URL has an unknown scheme, or none: write it as {FORMS}")
        if parts.fragment:
            raise StoreError("the store's URL has a '#': write %23 if it belongs to the password")
        user, password, hosts = _credentials(parts.netloc)
        query = _query(parts)
        if scheme == "unix":
            if hosts or not parts.path.startswith("/"):
                raise StoreError("a Unix socket's URL has three slashes and a full path: unix:///path/to.sock")
            path = unquote(parts.path)
            return cls((Endpoint(path=path),), user, password, _number(query.get("db", "0"), "db", 1 << 16))
        tls = _tls_files(query) if scheme == "rediss" else None
        if kind == "sentinel":
            master, db = _master(parts.path)
            sentinels = tuple(_endpoint(host, DEFAULT_SENTINEL_PORT) for host in hosts.split(","))
            return cls((Endpoint(master=master),), user, password, db, sentinels=sentinels, tls=tls)
        endpoints = tuple(_endpoint(host, DEFAULT_PORT) for host in hosts.split(","))
        cluster = kind == "cluster" or len(endpoints) > 1
        db = _database(parts.path.strip("/"))
        if cluster and db:
            raise StoreError(f"a cluster has the database 0 alone, not {db}: leave it out of the store's URL")
        return cls(endpoints, user, password, db, cluster, tls=tls)

    @property
    def scheme(self) -> str:
        """Of a URL for a single server."""
        return "redis" if self.tls is None else "rediss"

    def __str__(self) -> str:
        """As a URL, without the password."""
        who = f"{self.user}{':***' if self.password else ''}@" if self.user or self.password else ""
        if self.endpoints[0].path:
            return f"unix://{who}{self.endpoints[0].path}{f'?db={self.db}' if self.db else ''}"
        kind = "+sentinel" if self.sentinels else "+cluster" if self.cluster else ""
        hosts = ",".join(map(str, self.sentinels or self.endpoints))
        master = f"/{quote(self.endpoints[0].master, safe='')}" if self.sentinels else ""
        files = {name: path for name in _TLS_QUERY if (path := getattr(self.tls, name, ""))}
        query = f"?{urlencode(files, safe='/')}" if files else ""
        return f"{self.scheme}{kind}://{who}{hosts}{master}{f'/{self.db}' if self.db else ''}{query}"


def _split(url: str) -> SplitResult:
    """As `urlsplit`, of which newer versions refuse an IPv6 address behind another host. Raises StoreError."""
    found = _URL.fullmatch(url)
    scheme, netloc, *rest = (part or "" for part in found.groups()) if found else ("", "[", "", "", "")
    if netloc.count("[") != netloc.count("]"):
        raise StoreError(f"the store's URL cannot be read: write it as {FORMS}")
    return SplitResult(scheme.lower(), netloc, *rest)


def _credentials(netloc: str) -> tuple[str, str, str]:
    """User, password, and the rest."""
    who, _, hosts = netloc.rpartition("@")
    user, _, password = who.partition(":")
    user, password = unquote(user), unquote(password)
    if user and not password:
        raise StoreError("the store's URL has a user and no password: write user:password@, or :password@ alone")
    return user, password, hosts


def _query(parts: SplitResult) -> dict[str, str]:
    # A plus sign in a path is no space.
    query = dict(parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True))
    tls = parts.scheme.startswith("rediss")
    allowed = _TLS_QUERY if tls else ("db",) if parts.scheme == "unix" else ()
    unknown = query.keys() - {*allowed}
    if unknown & {*_TLS_QUERY}:
        raise StoreError("the store's URL has a file for TLS, and TLS is not asked for: write rediss:// for TLS")
    if "db" in unknown:
        raise StoreError(f"the store's URL has ?db=, which is for unix://: write it as {FORMS}")
    if unknown:
        raise StoreError(
            "the store's URL has a '?' with something else than "
            + ("ca, cert or key behind it; a certificate is always verified" if tls else "db behind it")
            + f": write it as {FORMS}, and %3F if it belongs to the password"
        )
    return query


def _tls_files(query: dict[str, str]) -> TlsFiles:
    files = TlsFiles(**query)
    if not all(path.startswith("/") for path in query.values()):
        raise StoreError("ca, cert and key in the store's URL are full paths of files: ?ca=/path/ca.pem")
    if files.key and not files.cert:
        raise StoreError("the store's URL has a key and no certificate: add &cert=/path/client.pem")
    return files


def _master(path: str) -> tuple[str, int]:
    """The master's name and the database, from /master-name[/db]."""
    name, _, db = path.removeprefix("/").partition("/")
    if not name:
        raise StoreError(
            "the store's URL names sentinels and no master: add its name, as in the sentinels' settings, behind the "
            "hosts: redis+sentinel://host:26379,host:26379/master-name"
        )
    return unquote(name), _database(db)


def _database(text: str) -> int:
    return _number(text or "0", "the database in the path", 1 << 16)


def _endpoint(text: str, default_port: int) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not host or (":" in host and not bracketed):
        raise StoreError(f"the store's URL lacks a host, or its IPv6 address has no brackets: write it as {FORMS}")
    if not is_host(host):
        raise StoreError(
            "the store's URL has a host that cannot be looked up: each part of a name has 1 to 63 characters between "
            f"its dots; write it as {FORMS}"
        )
    return Endpoint(host, _number(port, "the port", 1 << 16))


def is_host(name: str) -> bool:
    """Whether the system can look for it. `getaddrinfo` raises UnicodeError or ValueError for other names."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return "\0" not in name


def _number(text: str, what: str, limit: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= limit:
        raise StoreError(f"{what} in the store's URL is no number from 0 to {limit - 1}: write it as {FORMS}")
    return int(text)
