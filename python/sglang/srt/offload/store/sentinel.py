"""`MasterFinder`: asks Redis Sentinel which server is the master. Owns the order in which sentinels are asked.

It keeps no connection and no answer.

A connection to a master asks at each start: a failover breaks the old connection, or shows as a READONLY reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.offload.store.address import Endpoint, StoreAddress, is_host
from sglang.srt.offload.store.failures import ErrorReply, PasswordMissing, StoreFailure, StoreLost, StoreRefused


class MasterFinder:
    """address: with `sentinels`. ask(address, sentinel, timeout_s, command): the sentinel's reply; raises
    StoreFailure. For one thread."""

    def __init__(
        self, address: StoreAddress, ask: Callable[[StoreAddress, Endpoint, float, Sequence[str]], Any]
    ) -> None:
        assert address.sentinels
        # A sentinel has no databases. The password is sent only to one that wants it.
        self._with_password = replace(address, endpoints=address.sentinels, db=0)
        self._without = replace(self._with_password, user="", password="")
        self._sentinels = list(address.sentinels)
        self._ask = ask

    def find(self, name: str, deadline: float) -> Endpoint:
        """The first answer counts. Raises StoreRefused if the sentinels know no such master, else StoreLost."""
        failure: StoreFailure | None = None
        for i, sentinel in enumerate(self._sentinels):
            # A sentinel that does not answer leaves time for the others and for the master.
            timeout_s = (deadline - time.monotonic()) / (len(self._sentinels) - i + 1)
            if timeout_s <= 0:
                break
            try:
                master = self._ask_one(sentinel, name, timeout_s)
            except StoreFailure as error:
                # "No such master" counts for less than the failure of a sentinel that may know it.
                if failure is None or not isinstance(error, _UnknownMaster):
                    failure = error
                continue
            # The next search begins where an answer came from.
            self._sentinels.insert(0, self._sentinels.pop(i))
            return master
        if isinstance(failure, StoreRefused):
            raise failure
        raise StoreLost(f"no sentinel names the master {name}; the last reason: {failure or 'no time is left'}")

    def _ask_one(self, sentinel: Endpoint, name: str, timeout_s: float) -> Endpoint:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        try:
            try:
                reply = self._ask(self._without, sentinel, timeout_s, command)
            except PasswordMissing:
                if not self._with_password.password:
                    raise
                reply = self._ask(self._with_password, sentinel, timeout_s, command)
        except ErrorReply as error:
            raise StoreRefused(
                f"{sentinel} is no sentinel ({error}): name the sentinels in the store's URL, whose port is usually "
                f"26379, or write {self._with_password.scheme}:// for a single server"
            ) from None
        if reply is None:
            raise _UnknownMaster(f"{sentinel} knows no master {name}: correct the master's name in the store's URL")
        try:
            host, port = reply[0].decode(), int(reply[1])
            if len(reply) != 2 or not is_host(host) or not 0 < port < 1 << 16:
                raise ValueError
            return Endpoint(host, port)
        except (AttributeError, IndexError, TypeError, ValueError):
            raise StoreLost(f"{sentinel} names the master in a way that is not understood") from None


class _UnknownMaster(StoreRefused):
    pass
