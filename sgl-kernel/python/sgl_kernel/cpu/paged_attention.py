"""`PagedAttention`: a batch's attention over pages, by `csrc/cpu_decode.c` and `csrc/cpu_extend.c`."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch

from sgl_kernel.cpu.library import LIBRARY, function

# Of keys and values, and of queries; sums are in float32.
_DTYPES = (torch.float32, torch.bfloat16)


class _Arguments(ctypes.Structure):
    """`attention_args` of cpu_attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out", "lse", "k", "v")),
        *((name, ctypes.c_int64) for name in ("k_page_stride", "k_token_stride")),
        *((name, ctypes.c_int64) for name in ("v_page_stride", "v_token_stride", "v_head_stride")),
        *((name, ctypes.c_void_p) for name in ("rows", "q_lens", "table", "starts", "kv_lens", "sees", "skips")),
        ("scratch", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("q_stride", "num_reqs", "num_heads", "num_kv_heads", "head_dim", "value_dim")
        ),
        ("page_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("by_slot", ctypes.c_int32),
        ("narrow", ctypes.c_int32),
    ]


@cache
def _lanes() -> int:
    """Floats in a vector of the kernels."""
    return int(function("cpu_lanes")())


def takes_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `PagedAttention` takes queries (num_rows, num_heads, head_dim), keys (num_pages, page_size,
    num_kv_heads, head_dim) and values (num_pages, page_size, num_kv_heads, value_dim)."""
    return (
        q.is_cpu
        and LIBRARY.is_available()
        and q.dtype in _DTYPES
        and k.dtype == v.dtype
        and k.dtype in _DTYPES
        and q.shape[2] % _lanes() == 0
        and v.shape[3] % _lanes() == 0
        and q.stride(2) == 1
        and q.stride(1) == q.shape[2]
    )


class _Requests:
    """Requests of a batch for one of the kernels. Owns the numbers that it points to."""

    def __init__(self, table: torch.Tensor, by_slot: bool, window: int | None, **columns: np.ndarray) -> None:
        args = self.args = _Arguments()
        self._held = table, columns
        for name, column in columns.items():
            setattr(args, name, column.ctypes.data)
        args.table, args.by_slot, args.window = table.data_ptr(), by_slot, window or 0
        args.threads = torch.get_num_threads()
        args.num_reqs = len(columns["rows"])
        self._before = np.empty(args.num_reqs + 1, np.int64)


class _Extends(_Requests):
    def attend(self) -> None:
        function("cpu_extend")(ctypes.addressof(self.args), self._before.ctypes.data)


class _Decodes(_Requests):
    """num_chunks: of all requests. What they share is found at the first use."""

    def __init__(self, table: torch.Tensor, by_slot: bool, window: int | None, **columns: np.ndarray) -> None:
        if window is not None:
            # A query's keys are then the last ones, from another place on.
            hidden = np.maximum(columns["kv_lens"] - window, 0)
            moved = "starts" if by_slot else "skips"
            columns |= {"kv_lens": columns["kv_lens"] - hidden, moved: columns.get(moved, 0) + hidden}
        super().__init__(table, by_slot, None, **columns)
        self.num_chunks = int((-(-columns["kv_lens"] // int(function("cpu_decode_chunk")()))).sum())
        self._plan = np.empty((3, self.num_chunks), np.int64)
        self._num_groups: int | None = None

    def attend(self) -> None:
        args, before = ctypes.addressof(self.args), self._before.ctypes.data
        leader, order, ends = (row.ctypes.data for row in self._plan)
        if self._num_groups is None:
            self._num_groups = int(function("cpu_decode_plan")(args, before, leader, order, ends))
        function("cpu_decode")(args, before, order, ends, self._num_groups)


class PagedAttention:
    """What a batch attends to. Copies its numbers; holds the table."""

    def __init__(
        self,
        table: torch.Tensor,
        starts: np.ndarray,
        kv_lens: np.ndarray,
        q_lens: np.ndarray,
        sees: np.ndarray,
        skips: np.ndarray | None = None,
        by_slot: bool = False,
        window: int | None = None,
    ) -> None:
        """table: integers on the CPU, contiguous. The others: (num_reqs,) integers. Request i has q_lens[i] queries,
        which stand behind those of the requests before it. Its keys are kv_lens[i] tokens, from the skips[i]-th of
        page table[starts[i]] on; no skips are zeros. Its first query sees the first sees[i] keys, each following one
        a key more, up to all; a single query sees all. With a window a query sees the last of them only. by_slot: the
        table holds slots (page * page_size + offset), one per token, not pages."""
        table = table.to(torch.int64)
        named = {"starts": starts, "kv_lens": kv_lens, "q_lens": q_lens, "sees": sees, "skips": skips}
        columns = {name: np.asarray(each, np.int64) for name, each in named.items() if each is not None}
        columns["rows"] = np.cumsum(columns["q_lens"]) - columns["q_lens"]

        self._requests: list[_Decodes | _Extends] = []
        kinds: list[type[_Decodes | _Extends]] = [_Decodes, _Extends]
        for kind, which in zip(kinds, (columns["q_lens"] == 1, columns["q_lens"] > 1)):
            if which.any():
                chosen = {name: each[which] for name, each in columns.items()}
                self._requests.append(kind(table, by_slot, window, **chosen))
        self._scratch = torch.empty(0)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """q: (num_rows, num_heads, head_dim). k: (num_pages, page_size, num_kv_heads, head_dim), the last two
        dimensions contiguous. v: (num_pages, page_size, num_kv_heads, value_dim), the last dimension contiguous,
        maybe a part of k's memory. out: (num_rows, num_heads, value_dim) float32, contiguous. lse: (num_rows,
        num_heads) float32, contiguous. Writes all of out and lse: zeros and -inf for a query that sees no keys."""
        q = q.float()
        _, num_heads, head_dim = q.shape
        value_dim = v.shape[3]
        for requests in self._requests:
            args = requests.args
            if isinstance(requests, _Decodes):
                needed = requests.num_chunks * num_heads * (value_dim + 2)
                if self._scratch.numel() < needed:
                    self._scratch = torch.empty(needed)
                args.scratch = self._scratch.data_ptr()
            args.q, args.out, args.lse = q.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()
            args.k, args.k_page_stride, args.k_token_stride = k.data_ptr(), k.stride(0), k.stride(1)
            args.v, args.v_page_stride, args.v_token_stride = v.data_ptr(), v.stride(0), v.stride(1)
            args.v_head_stride = v.stride(2)
            args.q_stride, args.num_heads = q.stride(0), num_heads
            args.head_dim, args.value_dim = head_dim, value_dim
            args.page_size, args.num_kv_heads = k.shape[1], k.shape[2]
            args.scale, args.narrow = scale, k.dtype == torch.bfloat16
            requests.attend()
