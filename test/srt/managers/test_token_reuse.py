"""The table of texts that were tokenised before: which entries it keeps."""

from __future__ import annotations

import numpy as np

from sglang.srt.managers.token_reuse import TokenReuse

IDS = np.arange(4, dtype=np.int32)


def kept(table: TokenReuse, texts: str, namespace: str = "") -> str:
    """Those of the texts, a letter each, that are in the table. To look them up is a use."""
    return "".join(text for text, ids in zip(texts, table.find(namespace, list(texts))) if ids is not None)


def test_the_least_recently_used_go_first() -> None:
    table = TokenReuse(1 << 20)
    table.keep("", [("a", IDS)])
    one = table.size_bytes
    table = TokenReuse(10 * one + one // 2)
    table.keep("", ((text, IDS) for text in "abcdefghij"))
    assert kept(table, "abcde") == "abcde"
    table.keep("other", [("a", IDS), ("b", IDS)])
    table.check_invariants()
    assert kept(table, "abcdefghij") == "abcdehij" and kept(table, "abc", "other") == "ab"


def test_an_entry_is_counted_once_and_a_large_one_not_kept() -> None:
    table = TokenReuse(8000)
    for _ in range(100):
        table.keep("", [("a", IDS)])
    table.keep("", [("b", np.zeros(8000, np.int32))])
    table.check_invariants()
    assert kept(table, "ab") == "a"


def test_an_empty_table_has_all_its_room_again() -> None:
    table = TokenReuse(10_000)
    for _ in range(10):
        table.keep("", ((text, IDS) for text in "abcdefghij"))
        assert kept(table, "abcdefghij") == "abcdefghij"
        table.clear()
        table.check_invariants()
        assert table.size_bytes == 0 and kept(table, "abcdefghij") == ""
