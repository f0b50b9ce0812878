"""What an administrator does during a chaos, with the commands of `python -m sglang.cli`: erases and limits
tenants, keeps, names and warms prefixes, turns tiers off, empties them, changes policies. What can be known is
checked: what was erased is not found again, a tenant stays within its quota, and a refusal has a reason that an
operator knows."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from sglang.cli.commands import HICACHE
from sglang.cli.server import CommandError
from sglang.cli.server import Server as Asked
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.storage.file.folder import SEGMENT_SUFFIX
from sglang.srt.mem_cache.storage.file.tenant_log import TenantLog
from sglang.srt.offload.store.failures import StoreFailure
from sglang.srt.offload.store.object_store import Manifest
from support.all_tiers import ADMIN_KEY, SECRET, SOURCES, AllTiers
from support.chaos_requests import NUM_TURNS, PARAMS, TENANTS, Clients, References, Turn
from support.gate import Gate
from support.server_fixture import NO_TLS, PATIENCE_S, wait_until

# Salts of which the administrator alone makes requests. So it knows when they are not in use.
OWN = ("erased", "limited", "kept")
IN_MEMORY = ("device", "peer", "host")
# What a refusal may tell; the first only where a part has failed.
_TROUBLE = re.compile(
    r"storage is being attached|storage is left alone|did not do its part|did not take the quota"
    r"|no storage|the backend did not succeed"
)
_EXPLAINED = re.compile(
    _TROUBLE.pattern
    + r"|requests with this cache_salt are queued or running|no prefix is kept|no prefix has the label"
    r"|the cache is flushed only when idle"
    r"|the server has not measured it yet|detach it, and attach it again|more than half of the largest tier"
    r"|this server has no tier|has no tier"
)
# While one of them is going on, storage does not have what it will have again.
_RETURNS = {"disk gone", "storage detached"}
_POLICIES: dict[str, tuple[str, ...]] = {
    "schedule_policy": ("fcfs", "lpm"),
    "radix_eviction_policy": ("lru", "lfu", "priority"),
    "hicache_write_policy": ("auto", "write_through"),
    "hicache_storage_prefetch_policy": ("best_effort", "wait_complete", "timeout"),
    "hicache_load_ratio": ("auto", "0", "100"),
    "hicache_deferral_threshold": ("0", "100"),
    "hicache_bubble_filling": ("true", "false"),
    "hicache_load_or_recompute": ("true", "false"),
}
_NAMES = ("system", "a/b", "größe", "50%")


class Administrator:
    """One thread that acts in a seeded order, until the context ends. Then it takes back what it has changed."""

    def __init__(self, tiers: AllTiers, clients: Clients, references: References, seed: int) -> None:
        self._tiers = tiers
        self._server = tiers.server
        self._clients = clients
        self._references = references
        self._lock = threading.Lock()
        # Faults that go on, and those that went on at any time since the act began.
        self._faults: list[str] = []
        self._disturbed_by: set[str] = set()
        self._has_failed = False
        self._closed = threading.Event()
        # Closed while the server is restarted.
        self.gate = Gate()
        self._http = httpx.Client(base_url=tiers.server.url, timeout=PATIENCE_S, verify=NO_TLS)
        self._asked = Asked(argparse.Namespace(url=tiers.server.url, admin_api_key=ADMIN_KEY))
        self._before: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, args=(random.Random(f"{seed} administrator"),))

    def __enter__(self) -> Administrator:
        self._before = self._command("policies")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(3 * PATIENCE_S)
        assert not self._thread.is_alive(), "a call of the administrator does not end"
        self._clients.assert_right()

    @contextlib.contextmanager
    def during(self, fault: str) -> Iterator[None]:
        """That a fault goes on is known before it begins, until after its end."""
        with self._lock:
            self._faults.append(fault)
            self._has_failed = True
            self._disturbed_by.add(fault)
        try:
            yield
        finally:
            with self._lock:
                self._faults.remove(fault)

    def _run(self, rng: random.Random) -> None:
        acts: dict[Callable[[random.Random], str], int] = {
            self._erase_what_is_not_in_use: 6,
            self._erase_with_a_tier_off: 2,
            self._erase_while_a_request_runs: 2,
            self._erase_what_is_in_use: 2,
            self._limit: 4,
            self._limit_clients: 3,
            self._retain: 3,
            self._label: 2,
            self._set_policies: 3,
            self._look: 1,
            self._empty: 1,
        }
        while not self._closed.is_set():
            try:
                self._clients.wait_for_answers(rng.choice((-3, 0, 2)), self._closed.is_set)
            except AssertionError:
                return  # something is wrong, and noted
            with self._lock:
                self._disturbed_by = set(self._faults)
            act = rng.choices(list(acts), list(acts.values()))[0]
            with self.gate.passed():
                self._clients.note(act.__name__, lambda act=act: act(rng))  # type: ignore[misc]

    # -- calls ------------------------------------------------------------------------------------------------------

    def _command(self, *argv: str) -> Any:
        """A command's answer. Raises CommandError."""
        name, *rest = argv
        parser = argparse.ArgumentParser()
        HICACHE[name].add_arguments(parser)
        args = parser.parse_args([*rest, "--url", self._server.url, "--admin-api-key", ADMIN_KEY])
        text = HICACHE[name].run(args)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def _try(self, *argv: str) -> Any:
        """A command's answer, or None if it is refused for a reason that is known."""
        return self._unless_refused(lambda: self._command(*argv))

    def _unless_refused(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CommandError as error:
            self._check_refusal(str(error))
            return None

    def _check_refusal(self, text: str) -> None:
        assert _EXPLAINED.search(text), f"a refusal without a reason: {text}"
        if "disk" not in self._tiers.forgetful and "but disk did not do its part" in text:
            return  # a plugin cannot
        # A part that has failed is left alone for a while after it works again.
        with self._lock:
            assert self._has_failed or not _TROUBLE.search(text), f"nothing has failed: {text}"

    def _ask(self, turn: Turn, salt: str) -> tuple[str, dict[str, int]]:
        """What is wrong with the answer, and where the prompt's tokens were found."""
        reply = self._clients.post(self._http, turn, {"cache_salt": salt})
        return self._clients.check(turn, reply), reply["meta_info"]["cached_tokens_details"]

    def _any_turn(self, rng: random.Random) -> Turn:
        return rng.choice(rng.choice(self._references.conversations))

    # -- tenants ----------------------------------------------------------------------------------------------------

    def _erase_what_is_not_in_use(self, rng: random.Random, meanwhile: Callable[[], None] = lambda: None) -> str:
        salt, turn = rng.choice(OWN), self._any_turn(rng)
        if rng.random() < 0.5:
            wrong = "".join(self._ask(turn, salt)[0] for _ in range(rng.choice((1, 2))))
        else:
            warmed = self._asked.ask("POST", "/hicache/warm", {"prompts": [turn.prompt], "cache_salt": salt}, None)
            wrong = "" if len(warmed["prompts"]) == 1 else f"warmed: {warmed}"
        meanwhile()
        return wrong or self._erase(salt, turn)

    def _erase(self, salt: str, turn: Turn) -> str:
        """Erase, and ask again."""
        before = self._keys_on_disk(salt)
        kinds = self._clients.seen.kinds
        try:
            erased = set(self._command("erase", "--salt", salt)["tiers"])
        except CommandError as error:
            kinds["(not erased)"] += 1
            self._check_refusal(str(error))
            if "memory was erased" not in str(error):
                return ""
            erased = set(IN_MEMORY)
        kinds["(erased)"] += 1
        kinds["(erased from the disk)"] += bool(before)
        erased = self._gone_for_good(erased)
        if left := self._left_in_storage(salt, before, erased):
            return left
        wrong, found = self._ask(turn, salt)
        erased = self._gone_for_good(erased)
        if again := {tier: n for tier, n in found.items() if n and tier in erased}:
            return f"{salt} was erased from {erased}, and finds {again}"
        return wrong

    def _gone_for_good(self, erased: set[str]) -> set[str]:
        """Without storage that has again what it had. What it brought a request before it was detached counts as the
        host's."""
        with self._lock:
            if "storage detached" in self._disturbed_by:
                return erased & {"device", "peer"}
            return erased & set(IN_MEMORY) if self._disturbed_by & _RETURNS else erased

    def _erase_with_a_tier_off(self, rng: random.Random) -> str:
        """A tier that is not read or written has what it had, until it is erased."""
        tier, what = rng.choice(SOURCES[1:]), rng.choice(("--reads", "--writes"))
        try:
            return self._erase_what_is_not_in_use(rng, lambda: self._try("tier", tier, what, "off"))
        finally:
            self._try("tier", tier, what, "on")

    def _erase_while_a_request_runs(self, rng: random.Random) -> str:
        salt, turn = rng.choice(OWN), self._any_turn(rng)
        params = {**PARAMS, "max_new_tokens": 100}
        body = {"input_ids": turn.prompt, "sampling_params": params, "stream": True, "cache_salt": salt}
        with self._http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = filter(None, response.iter_lines())
            first = next(lines)
            self._try("erase", "--salt", salt, *(["--abort-requests"] if rng.random() < 0.7 else []))
            *_, last, done = (line.removeprefix("data: ") for line in (first, *lines))
        event = json.loads(last)
        if "error" in event:
            return "" if event["error"]["code"] == 503 else f"ended by an erasure: {event}"
        output_ids = event["output_ids"][: len(turn.output_ids)]
        return "" if output_ids == turn.output_ids and done == "[DONE]" else f"{output_ids} is not {turn.output_ids}"

    def _erase_what_is_in_use(self, rng: random.Random) -> str:
        """By the clients, whose answers stay right."""
        self._try("erase", "--salt", rng.choice(TENANTS))
        return ""

    def _limits(self, rng: random.Random) -> dict[str, int]:
        tiers = (*IN_MEMORY, *self._tiers.forgetful)
        return {tier: rng.choice((0, 64, 256, 1000)) for tier in tiers if rng.random() < 0.6}

    def _limit_clients(self, rng: random.Random) -> str:
        self._set_quota(rng.choice(TENANTS), self._limits(rng) if rng.random() < 0.7 else {})
        return ""

    def _set_quota(self, salt: str, limits: dict[str, int]) -> Any:
        given = [f"{tier}={tokens}" for tier, tokens in limits.items()] or ["--none"]
        return self._try("quota", "--salt", salt, *given)

    def _limit(self, rng: random.Random) -> str:
        """Set a quota and ask; lower it; lift it."""
        salt = rng.choice(OWN)
        limits = self._limits(rng)
        for quota in (limits, {tier: tokens // 2 for tier, tokens in limits.items()}):
            if self._set_quota(salt, quota) is None:
                return ""
            for _ in range(rng.choice((0, 1, 2))):
                if wrong := self._ask(self._any_turn(rng), salt)[0]:
                    return wrong
            in_memory = {tier: tokens for tier, tokens in quota.items() if tier in IN_MEMORY}
            if over := self._over(salt, in_memory):
                return over
        return "" if self._set_quota(salt, {}) is None or not self._quotas(salt)["quotas"] else "a quota stays"

    def _quotas(self, salt: str) -> dict[str, Any]:
        return self._command("quota", "--salt", salt)  # type: ignore[no-any-return]

    def _over(self, salt: str, limits: dict[str, int]) -> str:
        """What a tenant keeps beyond its quota while clients are answered. Pages that a store holds on to stay until
        it lets go."""
        used: dict[str, int] = {}

        def is_within() -> bool:
            used.update(self._quotas(salt)["used_tokens"])
            return self._closed.is_set() or all(used[tier] <= tokens for tier, tokens in limits.items())

        try:
            wait_until(is_within)
        except AssertionError:
            return f"{salt} has {used}, and its quota is {limits}"
        return ""

    # -- prefixes and policies --------------------------------------------------------------------------------------

    def _retain(self, rng: random.Random) -> str:
        name, turn, salt = rng.choice(_NAMES), self._any_turn(rng), rng.choice(("", *TENANTS, *OWN))
        if rng.random() < 0.3:
            self._try("release", name)
            return ""
        ttl_s = rng.choice((0.2, 5.0, 1e4))
        body = {"input_ids": turn.prompt, "ttl_s": ttl_s} | ({"cache_salt": salt} if salt else {})
        path = f"/hicache/retention/{quote(name, safe='')}"
        kept = self._unless_refused(lambda: self._asked.ask("PUT", path, body))
        shown = {each["name"]: each for each in self._command("retained")["prefixes"]}
        if kept is not None and ttl_s > 100 and name not in shown:
            return f"{name} is not kept: {shown}"
        if kept is not None and ttl_s < 1:
            wait_until(lambda: name not in {each["name"] for each in self._command("retained")["prefixes"]})
        return ""

    def _label(self, rng: random.Random) -> str:
        name = rng.choice(_NAMES)
        if rng.random() < 0.5:
            path, body = f"/hicache/labels/{quote(name, safe='')}", {"input_ids": self._any_turn(rng).prompt}
            self._unless_refused(lambda: self._asked.ask("PUT", path, body))
            labels = [each["name"] for each in self._command("labels")["labels"]]
            return "" if name in labels else f"{name} is no label of {labels}"
        self._try("unlabel", name)
        return ""

    def _set_policies(self, rng: random.Random) -> str:
        chosen = {name: rng.choice(_POLICIES[name]) for name in rng.sample(list(_POLICIES), rng.choice((1, 2)))}
        self._try("policies", *(f"{name}={value}" for name, value in chosen.items()))
        try:
            self._command("policies", f"{next(iter(chosen))}=newest")
        except CommandError as error:
            return "" if next(iter(chosen)) in str(error) or _EXPLAINED.search(str(error)) else str(error)
        return "a policy that there is not was taken"

    def _look(self, rng: random.Random) -> str:
        for command in ("state", "tiers", "policies", "retained", "labels"):
            self._command(command)
        self._try("advise")
        for path in ("/metrics", "/hicache/history", "/hicache", "/get_server_info", "/v1/loads", "/health_generate"):
            reply = self._http.get(path)
            assert reply.status_code == 200, f"{path}: {reply.text}"
        return ""

    def _empty(self, rng: random.Random) -> str:
        """Memory or storage, while clients are answered."""
        self._try(rng.choice(("flush", "clear")))
        return ""

    # -- storage ----------------------------------------------------------------------------------------------------

    def _tenant(self, salt: str) -> bytes:
        return BlockKeys(b"", self._tiers.block_tokens, hashlib.blake2b(SECRET.encode()).digest()).tenant(salt)

    def _keys_on_disk(self, salt: str) -> set[bytes]:
        """Of the blocks that there are, or may be."""
        found: set[bytes] = set()
        for path in self._tiers.disk.folder.rglob("tenants"):
            with contextlib.suppress(OSError):
                found.update(TenantLog(path.parent, lambda num_bytes: None).keys_of(self._tenant(salt)))
        return found

    def _blocks_on_disk(self, keys: set[bytes]) -> int:
        found = 0
        for path in self._tiers.disk.folder.rglob("*" + SEGMENT_SUFFIX):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                found += sum(key in data for key in keys)
        return found

    def _blocks_in_store(self, salt: str) -> int:
        connection = self._tiers.store.connection()
        names = connection.call("KEYS", "*:m")
        assert isinstance(names, list)
        found = 0
        for name in names:
            assert isinstance(name, bytes)
            manifest = connection.call("GET", name)
            with contextlib.suppress(msgspec.DecodeError, TypeError):
                found += msgspec.msgpack.decode(manifest, type=Manifest).tenant == self._tenant(salt)  # type: ignore[arg-type]
        connection.close()
        return found

    def _left_in_storage(self, salt: str, keys: set[bytes], tiers: set[str]) -> str:
        """What is left on the disk of these blocks and any other of the salt, and in the store."""
        left = []
        if "disk" in tiers and (n := self._blocks_on_disk(keys | self._keys_on_disk(salt))):
            left.append(f"{n} blocks on the disk")
        try:
            if "remote" in tiers and self._is_store_up and (n := self._blocks_in_store(salt)):
                left.append(f"{n} blocks in the store")
        except StoreFailure:
            if self._is_store_up:
                raise
        return f"{salt} was erased, and has left {' and '.join(left)}" if left else ""

    @property
    def _is_store_up(self) -> bool:
        with self._lock:
            return not any(name.startswith("store") for name in self._disturbed_by)

    # -- the end ----------------------------------------------------------------------------------------------------

    def take_back(self) -> None:
        """All that was changed. Storage may still be left alone for a while."""
        for name in _NAMES:
            self._try("release", name)
            self._try("unlabel", name)
        for salt in (*OWN, *TENANTS):
            wait_until(lambda salt=salt: self._set_quota(salt, {}) is not None)  # type: ignore[misc]
        after = {name: value for name, value in self._before.items() if name != "hicache_write_policy"}
        self._command("policies", *(f"{name}={json.dumps(value).strip(chr(34))}" for name, value in after.items()))

    def assert_all_is_well(self) -> None:
        """With all parts well, and no client: damage is found; what a tenant has in storage stays within its quota;
        each tenant is erased from the disk and the store."""
        self._disturbed_by, salt = set(), OWN[0]
        turns = itertools.cycle(turn for each in self._references.conversations for turn in each[:: NUM_TURNS - 1])
        asked: list[Turn] = []
        forgetful = self._tiers.forgetful

        def is_stored() -> bool:
            asked.append(next(turns))
            self._ask_rightly(asked[-1], salt)
            is_on_disk = "disk" not in forgetful or self._blocks_on_disk(self._keys_on_disk(salt)) > 2
            return is_on_disk and self._blocks_in_store(salt) > 0

        wait_until(is_stored)
        self._assert_damage_is_found(salt, asked, turns)
        # What was damaged may be a reason to leave the store alone for a while.
        two_blocks = 2 * self._tiers.block_tokens
        wait_until(lambda: self._set_quota(salt, dict.fromkeys(forgetful, two_blocks)) is not None)
        assert (
            self._blocks_on_disk(self._keys_on_disk(salt)) <= 2 * self._tiers.num_stores
            and self._blocks_in_store(salt) <= 2 * self._tiers.num_stores
        )
        wait_until(lambda: self._set_quota(salt, {}) is not None)
        for each in (*OWN, *TENANTS):
            if each == salt and (wrong := self._erase(each, asked[0])):
                raise AssertionError(wrong)
            # A damaged block that is read may be a reason to leave the store alone once more.
            wait_until(lambda each=each: self._is_erased(each))  # type: ignore[misc]
            if left := self._left_in_storage(each, set(), {*IN_MEMORY, *forgetful}):
                raise AssertionError(left)

    def _is_erased(self, salt: str) -> bool:
        """Erase, wherever that can be."""
        try:
            self._command("erase", "--salt", salt)
        except CommandError as error:
            self._check_refusal(str(error))
            return "disk" not in self._tiers.forgetful and "but disk did not do" in str(error)
        return True

    def _assert_damage_is_found(self, salt: str, asked: list[Turn], turns: Iterator[Turn]) -> None:
        """In the remote store, from which alone these prompts come then. asked: before. turns: to ask more of."""

        def num_damaged() -> int:
            found: int = self._server.state()["tiers"]["remote"]["damaged_blocks"]
            return found

        def is_found() -> bool:
            self._command("flush")
            self._tiers.damage_store()
            for turn in asked:
                self._ask_rightly(turn, salt)
                if num_damaged() > before:
                    return True
            # With write_back the store has only what the tiers above have no room for.
            asked.append(next(turns))
            return False

        before = num_damaged()
        self._command("tier", "disk", "--reads", "off")
        wait_until(is_found)
        self._command("tier", "disk", "--reads", "on")

    def _ask_rightly(self, turn: Turn, salt: str) -> None:
        if wrong := self._ask(turn, salt)[0]:
            raise AssertionError(wrong)
        self._settle()

    def _settle(self) -> None:
        wait_until(lambda: not any(each["operations_in_flight"] for each in self._server.state()["links"].values()))
