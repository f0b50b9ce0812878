"""The counts of generated tokens."""

from __future__ import annotations

import torch

from sglang.srt.sampling.penalties import PenaltyTable


def test_a_token_that_was_generated_more_often_than_is_counted() -> None:
    """Its penalty changed its sign."""
    table, slot, token = PenaltyTable(1, 4), torch.tensor([0]), torch.tensor([2])

    def penalty() -> float:
        one, half, none = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.0])
        return float(table.apply(torch.zeros(1, 4), slot, half, none, one)[0, 2])

    table.start(0, token.repeat(32_766))
    found = [penalty()]
    for _ in range(2):
        table.add(slot, token)
        found.append(penalty())
    table.start(0, token.repeat(40_000))
    assert [*found, penalty()] == [-32_766 / 2, -32_767 / 2, -32_767 / 2, -32_767 / 2]
