"""The counts of generated tokens."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel.cpu.library import LIBRARY
from sglang.srt.sampling.penalties import PenaltyTable

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("way", ["C", "torch", pytest.param("GPU", marks=(pytest.mark.gpu, needs_gpu))])
def test_only_tokens_that_were_generated_change(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "torch":
        monkeypatch.setattr("sglang.srt.sampling.penalties.takes", lambda logits: False)
    elif way == "C" and not LIBRARY.is_available():
        pytest.skip("no C compiler")
    device = torch.device("cuda" if way == "GPU" else "cpu")
    g = torch.Generator().manual_seed(1)
    # The last ones stand alone behind whole vectors.
    num_slots, vocab_size = 5, 1003
    table, counts = PenaltyTable(num_slots, vocab_size, device), torch.zeros(num_slots, vocab_size)
    for slot in range(num_slots):
        tokens = torch.randint(0, vocab_size, (60 * slot,), generator=g) if slot < 4 else torch.tensor([1002] * 9)
        table.start(slot, tokens.to(device))
        counts[slot] = torch.bincount(tokens, minlength=vocab_size)
    logits = torch.randn(6, vocab_size, generator=g) * 5
    logits[0, 7] = -torch.inf
    rows, slots = torch.tensor([4, 0, 2, 5]), torch.tensor([3, 1, 4, 0])
    frequency, presence = torch.tensor([0.5, 0.0, -0.3, 2.0]), torch.tensor([0.0, 1.5, 0.2, 1.0])
    repetition = torch.tensor([1.0, 1.2, 0.9, 1.1])
    want = logits.double()
    for row, slot, f, p, r in zip(rows, slots, frequency, presence, repetition):
        for token in counts[slot].nonzero()[:, 0]:
            x = want[row, token]
            want[row, token] = (x / r if x > 0 else x * r) - counts[slot, token] * f - p
    there, penalties = logits.to(device), torch.stack((frequency, presence, repetition))
    table.apply(there, *(each.to(device) for each in (rows, slots, penalties)))
    logits = there.cpu()
    assert torch.allclose(logits.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits[[1, 3, 5]].double(), want[[1, 3, 5]])


def test_a_token_that_was_generated_more_often_than_is_counted() -> None:
    """Its penalty changed its sign."""
    table, slot, token = PenaltyTable(1, 4), torch.tensor([0]), torch.tensor([2])

    def penalty() -> float:
        logits = torch.zeros(1, 4)
        table.apply(logits, slot, slot, torch.tensor([[0.5], [0.0], [1.0]]))
        return float(logits[0, 2])

    table.start(0, token.repeat(32_766))
    found = [penalty()]
    for _ in range(2):
        table.add(slot, token)
        found.append(penalty())
    table.start(0, token.repeat(40_000))
    assert [*found, penalty()] == [-32_766 / 2, -32_767 / 2, -32_767 / 2, -32_767 / 2]
