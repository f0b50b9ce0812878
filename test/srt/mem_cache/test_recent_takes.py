"""How much is copied ahead of eviction follows what prompts take."""

from __future__ import annotations

from sglang.srt.mem_cache.recent_takes import RecentTakes


def test_prompts_are_taken_to_need_a_chunk_until_they_need_less():
    takes = RecentTakes(100)
    assert takes.num_pages == 100
    seen = []
    for _ in range(100):
        takes.note(40)
        seen.append(takes.num_pages)
    assert seen == sorted(seen, reverse=True) and seen[0] > 90 and seen[-1] == 40
    takes.note(70)
    assert takes.num_pages == 70, "at once"
    takes.note(1000)
    assert takes.num_pages == 100, "a chunk at most"
