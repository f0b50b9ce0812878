"""`BlockKeys`: a name says everything that a block's KV depends on, and nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from sglang.srt.mem_cache.block_keys import KEY_BYTES, NO_KEYS, BlockKeys, to_bytes
from sglang.srt.mem_cache.namespaces import is_private, private

KEYS = BlockKeys(b"secret", 4)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 30, n).astype(np.int32)


def names(run: np.ndarray, keys: BlockKeys = KEYS, namespace: str = "") -> list[bytes]:
    return to_bytes(keys.of_prompt(namespace, run))


def test_whole_blocks_have_a_name_each():
    for n, blocks in ((0, 0), (1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (1000, 250)):
        found = KEYS.of_prompt("", tokens(n))
        assert found.shape == (blocks, KEY_BYTES) and found.dtype == np.uint8
        assert len(set(to_bytes(found))) == blocks
    assert to_bytes(NO_KEYS) == [] and NO_KEYS.shape == (0, KEY_BYTES)


def test_the_chain_is_what_the_module_says():
    run = tokens(8)
    last = hashlib.blake2b(b"tenant", key=b"secret", digest_size=16).digest()
    wanted = []
    for block in (run[:4], run[4:]):
        last = hashlib.blake2b(last + block.astype("<i4").tobytes(), key=b"secret", digest_size=16).digest()
        wanted.append(last)
    assert names(run, namespace="tenant") == wanted
    assert KEYS.root("tenant") == hashlib.blake2b(b"tenant", key=b"secret", digest_size=16).digest()


def test_a_name_depends_on_every_token_up_to_its_end_and_on_none_after():
    run = tokens(16)
    whole = names(run)
    for at in range(16):
        other = run.copy()
        other[at] ^= 1
        assert [a == b for a, b in zip(whole, names(other))] == [block < at // 4 for block in range(4)]
    assert names(np.concatenate((run, tokens(9, seed=1))))[:4] == whole
    assert names(run[4:])[0] != whole[1], "the same tokens behind others are another block"


def test_namespaces_secrets_and_sizes_never_share_a_name():
    run = tokens(16)
    others = [
        names(run, namespace="tenant"),
        names(run, BlockKeys(b"another", 4)),
        names(run, BlockKeys(b"", 4)),
        names(run, BlockKeys(b"secret", 8)),
    ]
    all_names = [name for other in [names(run), *others] for name in other]
    assert len(all_names) == len(set(all_names))


def test_a_chain_in_pieces_is_the_chain_at_once():
    run = tokens(40)
    whole = KEYS.of_prompt("ns", run)
    last, pieces = KEYS.root("ns"), []
    for start, end in ((0, 4), (4, 4), (4, 24), (24, 40)):
        pieces.append(KEYS.chain(last, run[start:end]))
        if len(pieces[-1]):
            last = pieces[-1][-1].tobytes()
    assert np.array_equal(np.concatenate(pieces), whole)


def test_how_the_tokens_lie_in_memory_does_not_matter():
    run = tokens(16)
    spread = np.zeros(32, np.int32)
    spread[::2] = run
    assert names(spread[::2]) == names(run) == names(run.astype(">i4")) == names(run.astype(np.int64))
    frozen = run.copy()
    frozen.flags.writeable = False
    assert names(frozen) == names(run)


def test_a_block_has_at_least_one_token():
    assert len(names(tokens(3), BlockKeys(b"s", 1))) == 3
    with pytest.raises(ValueError, match="at least one token"):
        BlockKeys(b"s", 0)


def test_a_private_namespace_has_the_names_of_the_shared_one():
    run = tokens(12)
    for namespace in ("", "tenant"):
        own = private(namespace, 7)
        assert own != private(namespace, 8) and is_private(own) and not is_private(namespace)
        assert names(run, namespace=own) == names(run, namespace=namespace)
    assert private("", 1) != private("tenant", 1)
