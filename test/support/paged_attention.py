"""`PagedAttention`: attention on the device emulator that a graph can hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, PartialMask
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_view import KVSegment, KVView, PagedSegments
from sglang.srt.mem_cache.page_memory import indexable
from support.device_emulator import launch


class PagedAttention:
    """Attention that a graph can hold: it reads everything on the device, when it runs. replayed: graphs of
    decodes, and with captures_extends of prefills."""

    computes_masked = False

    def __init__(self, captures_extends: bool = False) -> None:
        self.capturing = False
        self.captures_extends = captures_extends
        self.long_extend_len = None
        # On the device, of the segments of graphs.
        self._q_lens: dict[PagedSegments, torch.Tensor] = {}
        self.replayed = 0
        self._others = TorchNativeAttnBackend()

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        if not isinstance(segments, PagedSegments):
            return self._others.forward(q, view, segments, meta)
        if self.capturing and segments not in self._q_lens:
            self._q_lens[segments] = torch.from_numpy(segments.q_lens.copy()).to(q.device)
        if segments in self._q_lens:
            q_lens = self._q_lens[segments]
        elif set(meta.q_lens) == {1}:
            q_lens = torch.ones_like(segments.device_starts)
        else:
            return self._others.forward(q, view, segments, meta)
        group = q.shape[1] // view.k.shape[2]

        def attend(
            out: torch.Tensor,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            table: torch.Tensor,
            starts: torch.Tensor,
            kv_lens: torch.Tensor,
            q_lens: torch.Tensor,
        ) -> None:
            page, row = k.shape[1], 0
            for start, kv_len, q_len in zip(starts.tolist(), kv_lens.tolist(), q_lens.tolist()):
                pages = table[start : start - (-kv_len // page)].long()
                found = (indexable(x)[pages].view(x.dtype).flatten(0, 1)[:kv_len].to(q.dtype) for x in (k, v))
                keys, values = (x.repeat_interleave(group, dim=1) for x in found)
                scores = torch.einsum("qhd,thd->hqt", q[row : row + q_len], keys) * meta.scale
                # How many keys each query sees; of a graph's spare rows, none.
                seen = kv_len - q_len + 1 + torch.arange(q_len)[:, None]
                scores = scores.masked_fill(torch.arange(kv_len) >= seen, -torch.inf)
                attended = torch.einsum("hqt,thd->qhd", scores.softmax(-1), values)
                out[row : row + q_len] = attended.masked_fill(seen[:, :, None] <= 0, 0)
                row += q_len

        out = q.new_empty(*q.shape[:2], view.v.shape[3])
        lens = segments.device_kv_lens, q_lens
        launch(attend, out, q, view.k, view.v, segments.table, segments.device_starts, *lens)
        return out

    def before_replay(self, segments: PagedSegments) -> None:
        assert segments.kv_lens.tolist() != [0] * len(segments), "the host knows what is replayed"
        self._q_lens[segments].copy_(torch.from_numpy(segments.q_lens.copy()).pin_memory(), non_blocking=True)
        self.replayed += 1

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float, mask: PartialMask | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._others.partial(q, view, segment, scale, mask)
