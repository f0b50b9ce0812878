"""The registry of storage backends: which there are, what they offer, and how one is opened.

A new backend is a file with a subclass of `StorageBackend`, and one line in `STORAGE_BACKENDS`; the flag, `--help`,
the checks before the start and docs/reference/storage.md follow. Owns the list, and knows no backend: each is
imported when it is used. Loads nothing heavy, as the command line is read with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.registry import EntryError, Option, OptionError, load_object, read_options

BACKEND_FLAG = "--hicache-storage-backend"
CONFIG_FLAG = "--hicache-storage-backend-extra-config"


@dataclass(frozen=True)
class StorageEntry:
    """What is known of a backend before it is imported."""

    tier: Tier
    # Where the KV is, as `--help` puts it.
    summary: str
    # "module:class" of a `StorageBackend`.
    backend: str


_STORAGE = "sglang.srt.mem_cache.storage"
_OFFLOAD = "sglang.srt.offload"
# The name that --hicache-storage-backend takes -> the backend.
STORAGE_BACKENDS: dict[str, StorageEntry] = {
    "file": StorageEntry(Tier.DISK, "on a disk", f"{_STORAGE}.file.backend:FileBackend"),
    "remote": StorageEntry(Tier.REMOTE, "in a Redis store", f"{_OFFLOAD}.remote_backend:RemoteBackend"),
    "bluefield": StorageEntry(
        Tier.REMOTE, "through an offload proxy that you start", f"{_OFFLOAD}.remote_backend:BluefieldBackend"
    ),
    "dynamic": StorageEntry(Tier.DISK, "through a plugin", f"{_STORAGE}.dynamic.backend:DynamicBackend"),
}


@dataclass(frozen=True)
class StoreParams:
    """What a backend is given to open the store of one rank, or of ranks that cache the same."""

    # Of --hicache-storage-backend-extra-config, without what `StorageOpener` itself reads.
    config: Mapping[str, Any]
    # What the bytes of a block depend on beside its tokens: the model, the layout, the rank. Without the page size
    # where the backend takes any.
    namespace: str
    # The host pool whose pages are stored, an `MHATokenToKVPoolHost`.
    pool: Any
    block_tokens: int
    model_name: str
    # Among the server's stores: ranks that cache the same have one.
    tp_rank: int = 0
    # How many stores share memory and limits.
    tp_size: int = 1
    # A store of the same rank, for its other layers, that was opened before: where both share the rank's limits.
    beside: BlockStore | None = None
    # Of the model's num_layers those that its pages have, where these are not all.
    layers: tuple[int, ...] = ()
    num_layers: int = 0
    # See `StorageSetup`.
    is_exclusive: bool = False
    # A private directory of the rank that opens it, which is removed when the server ends.
    directory: Path = Path()
    # With which blocks in a shared store are authenticated; empty if the deployment has no secret.
    mac_key: bytes = b""


class StorageBackend(ABC):
    """What the file of a backend defines. Holds no state.

    options: its settings, keys of --hicache-storage-backend-extra-config. takes_any_key: whether other keys are
    accepted, for a plugin. takes_any_page_size: whether servers with other page sizes find the blocks. takes_regions:
    whether a store of its own for layers with a window may be opened, where these have pages of their own.
    """

    options: ClassVar[tuple[Option, ...]] = ()
    takes_any_key: ClassVar[bool] = False
    takes_any_page_size: ClassVar[bool] = False
    takes_regions: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        """name: the one in `STORAGE_BACKENDS`."""
        self.name = name

    @property
    def flag(self) -> str:
        """How a sentence begins that refuses a setting."""
        return f"{BACKEND_FLAG} {self.name}"

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every option. Raises StoreError."""
        known = {option.name for option in self.options}
        own = {key: value for key, value in config.items() if key in known} if self.takes_any_key else config
        try:
            return read_options(self.options, own, self.flag)
        except OptionError as error:
            raise StoreError(str(error)) from None

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse what can be refused before any process is started. Loads no torch. Raises StoreError."""
        self.values(config)

    @abstractmethod
    def open(self, params: StoreParams) -> BlockStore:
        """Raises StoreError."""

    def shared_secret(self, config: Mapping[str, Any]) -> bytes | None:
        """The key of the names of blocks, for all who use the same store, where the user gave none. None: no key.
        Raises StoreError."""
        return None

    def is_lossy(self, config: Mapping[str, Any]) -> bool:
        """Whether what is read may differ from what was written."""
        return False


def storage_backend(name: str) -> StorageBackend:
    """name: one of `STORAGE_BACKENDS`. Raises StoreError if its code cannot be loaded."""
    try:
        backend: StorageBackend = load_object(STORAGE_BACKENDS[name].backend)(name)
    except EntryError as error:
        raise StoreError(f"{BACKEND_FLAG} {name}: {error}") from error
    return backend


def parse_backends(text: str) -> tuple[str, ...]:
    """The names in --hicache-storage-backend: one, or a local one and a remote one. Raises StoreError."""
    names = tuple(text.split(","))
    for name in names:
        if name not in STORAGE_BACKENDS:
            raise StoreError(
                f"{BACKEND_FLAG} {name} is not built in: it must be one of {', '.join(STORAGE_BACKENDS)}, or two of "
                "them like file,remote; 'dynamic' loads plugins"
            )
    if len(names) > 1 and [STORAGE_BACKENDS[name].tier for name in names] != [Tier.DISK, Tier.REMOTE]:
        raise StoreError(
            f"{BACKEND_FLAG} {text}: two backends are a local and a remote one, in this order, like file,remote"
        )
    return names


def describe_backends() -> str:
    """For `--help`."""
    each = ", ".join(f"'{name}' {entry.summary}" for name, entry in STORAGE_BACKENDS.items())
    return f"storage below the host: {each}, 'file,remote' for a disk and a store"
