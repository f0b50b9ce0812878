"""Labels of prefixes: which prefix has which, and that they tell nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang.srt.mem_cache.prefix_labels import MAX_LABELS, PrefixLabels


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_longest_label_that_a_prefix_begins_with_counts() -> None:
    labels = PrefixLabels(page_size=1)
    assert labels.put("short", "", ids(1, 2)) == labels.put("long", "", ids(1, 2, 3, 4)) == ""
    assert labels.find("", [ids(1)]) is None
    assert labels.find("", [ids(1, 2)]) == labels.find("", [ids(1), ids(2, 3, 9, 9)]) == (2, "short")
    assert labels.find("", [ids(1, 2, 3), ids(4, 5)]) == (4, "long")
    assert labels.find("salt", [ids(1, 2, 3)]) is None and labels.find("", [ids(2, 1, 3, 4)]) is None
    assert labels.remove("long") and not labels.remove("long")
    assert labels.find("", [ids(1, 2, 3, 4)]) == (2, "short")


@pytest.mark.parametrize("seed", range(10))
def test_pieces_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    prompt = np.array([rng.randrange(1000) for _ in range(400)], np.int32)
    labels = PrefixLabels(page_size=16)
    lengths = {f"n{i}": rng.randrange(40, 400) for i in range(5)}
    for name, length in lengths.items():
        assert labels.put(name, "salt", prompt[:length]) == ""
    labels.check_invariants()
    end = rng.randrange(100, 400)
    cuts = sorted(rng.sample(range(1, end), 3))
    pieces = np.split(prompt[:end], cuts)
    # All but its last 16 tokens at most, in whole pages.
    matched = {name: (length - min(16, length // 8)) // 16 * 16 for name, length in lengths.items()}
    fitting = [n for name, n in matched.items() if n <= end]
    found = labels.find("salt", pieces)
    assert (found is None) == (not fitting), f"seed {seed}"
    if found is not None:
        assert matched[found[1]] == max(fitting) and found[0] == lengths[found[1]], f"seed {seed}"


def test_the_end_of_a_prompt_may_differ() -> None:
    """A template ends with the model's turn, where a longer conversation goes on."""
    labels = PrefixLabels(page_size=1)
    labels.put("system", "", np.arange(100, dtype=np.int32))
    assert labels.find("", [np.append(np.arange(90), [7, 7, 7]).astype(np.int32)]) == (100, "system")
    assert labels.find("", [np.append(np.arange(80), [7] * 40).astype(np.int32)]) is None


def test_labels_are_bounded_and_hold_neither_prompts_nor_salts() -> None:
    labels = PrefixLabels(page_size=4)
    assert "shorter than a page of 4" in labels.put("x", "", ids(1, 2, 3))
    for i in range(MAX_LABELS):
        assert labels.put(f"n{i}", "a secret salt", np.full(8, i, np.int32)) == ""
    assert "remove one" in labels.put("one more", "", np.arange(8, dtype=np.int32))
    assert labels.put("n0", "", np.arange(1000, dtype=np.int32)) == "", "in its own place"
    labels.check_invariants()
    assert labels.state()[0] == {"name": "n0", "tokens": 1000}
    assert "secret" not in repr(labels._labels) and len(repr(labels._labels)) < MAX_LABELS * 200
    same = PrefixLabels(page_size=4)
    same.put("n1", "a secret salt", np.full(8, 1, np.int32))
    assert same._labels["n1"] != labels._labels["n1"], "each process has a secret of its own"
