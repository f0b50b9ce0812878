"""`PagedDecode`: one query per request over pages, by `csrc/cpu_attention.c`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from sgl_kernel.cpu.library import function, takes


class _Arguments(ctypes.Structure):
    """`attention_args` of cpu_attention.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out", "lse", "k", "v")),
        *((name, ctypes.c_int64) for name in ("k_page_stride", "k_token_stride", "v_page_stride", "v_token_stride")),
        *((name, ctypes.c_void_p) for name in ("rows", "table", "starts", "kv_lens", "skips", "scratch")),
        *(
            (name, ctypes.c_int64)
            for name in ("q_stride", "num_reqs", "num_heads", "num_kv_heads", "head_dim", "page_size")
        ),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("by_slot", ctypes.c_int32),
    ]


def takes_heads(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether `PagedDecode` takes queries (num_rows, num_heads, head_dim) and keys (num_pages, page_size,
    num_kv_heads, head_dim)."""
    return (
        takes(q)
        and k.dtype == q.dtype
        and q.shape[2] % int(function("cpu_lanes")()) == 0
        and q.stride(2) == 1
        and q.stride(1) == q.shape[2]
    )


class PagedDecode:
    """The requests of a batch that have one query each. Copies its numbers; holds the table."""

    def __init__(
        self,
        table: torch.Tensor,
        rows: np.ndarray,
        starts: np.ndarray,
        kv_lens: np.ndarray,
        skips: np.ndarray | None = None,
        by_slot: bool = False,
    ) -> None:
        """table: integers on the CPU, contiguous. rows, starts, kv_lens, skips: (num_reqs,) integers. Request i is
        row rows[i] of the queries. Its keys are kv_lens[i] tokens, from the skips[i]-th of page table[starts[i]] on;
        no skips are zeros. by_slot: the table holds slots (page * page_size + offset), one per token, not pages."""
        self._table = table.to(torch.int64)
        self._columns = [
            None if each is None else np.array(each, np.int64) for each in (rows, starts, kv_lens, skips)
        ]
        addresses = [None if each is None else each.ctypes.data for each in self._columns]
        args = self._args = _Arguments()
        args.rows, args.starts, args.kv_lens, args.skips = addresses
        args.table = self._table.data_ptr()
        args.num_reqs, args.by_slot = len(rows), by_slot
        chunk = int(function("cpu_attention_chunk")())
        self._num_tasks = sum(-(-length // chunk) for length in kv_lens.tolist())
        self._before = np.empty(len(rows) + 1, np.int64)
        self._scratch = torch.empty(0)
        self._attend = function("cpu_attention")
        self._addresses = ctypes.addressof(args), self._before.ctypes.data

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """q, out: (num_rows, num_heads, head_dim), out contiguous. k, v: (num_pages, page_size, num_kv_heads,
        head_dim), the last two dimensions contiguous. lse: (num_rows, num_heads), contiguous. Writes the requests'
        rows of out and lse: zeros and -inf where a request has no keys."""
        args = self._args
        _, num_heads, head_dim = q.shape
        needed = self._num_tasks * num_heads * (head_dim + 2)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
            args.scratch = self._scratch.data_ptr()
        args.q, args.out, args.lse = q.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()
        args.k, args.k_page_stride, args.k_token_stride = k.data_ptr(), k.stride(0), k.stride(1)
        args.v, args.v_page_stride, args.v_token_stride = v.data_ptr(), v.stride(0), v.stride(1)
        args.q_stride, args.num_heads, args.head_dim = q.stride(0), num_heads, head_dim
        args.page_size, args.num_kv_heads = k.shape[1], k.shape[2]
        args.scale, args.threads = scale, torch.get_num_threads()
        self._attend(*self._addresses)
