"""A stand-in for the part of FlashInfer that `FlashInferAttnBackend` calls, on the CPU: a few lines of torch on just
the arguments that the real one gets. It checks what FlashInfer 0.6.14 checks, and what it reads without checking."""

from __future__ import annotations

import math
from typing import Any

import torch


class FakeFlashInfer:
    """calls: (class, method, args, kwargs) of everything that was called. wrappers: all that were made."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []
        self.wrappers: list[_Wrapper] = []

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Decode:
        return self._make(_Decode, "BatchDecodeWithPagedKVCacheWrapper", args, kwargs)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Prefill:
        return self._make(_Prefill, "BatchPrefillWithPagedKVCacheWrapper", args, kwargs)

    def _make(self, kind: Any, name: str, args: Any, kwargs: Any) -> Any:
        self.calls.append((name, "__init__", args, kwargs))
        wrapper = kind(*args, **kwargs)
        wrapper.log = lambda *call: self.calls.append((name, *call))
        self.wrappers.append(wrapper)
        return wrapper


class _Wrapper:
    log: Any

    def _keep(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, q_lens: list[int]
    ) -> None:
        arrays = (indptr, indices, last_page_len)
        assert all(x.dtype == torch.int32 and x.dim() == 1 for x in arrays)
        assert indptr[0] == 0 and indptr[-1] == len(indices) and len(indptr) == len(last_page_len) + 1
        empty = indptr.diff() == 0
        assert bool(((last_page_len >= 1) & (last_page_len <= self.page_size) | empty).all())
        assert not last_page_len[empty].any(), "FlashInfer counts the last page's tokens of a request without pages"
        self.q_lens = q_lens
        if self.buffers is None:
            # The very tensors, as torch's to() makes no copy where there is nothing to change.
            self.arrays = arrays
        else:
            for buffer, x in zip(self.buffers, arrays):
                buffer[: len(x)].copy_(x)
            assert len(self.buffers[2]) == len(last_page_len)
            self.arrays = self.buffers

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.log("run", args, kwargs)
        if self.buffers is not None:
            self.replay = lambda: self._run(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, q, paged_kv_cache, *, out, lse=None, return_lse=False):
        k, v = paged_kv_cache
        assert q.dtype == self.q_dtype and k.dtype == v.dtype == self.kv_dtype and out.dtype == self.q_dtype
        assert k.stride() == v.stride() and k.stride(3) == 1
        assert (k.shape[1], q.shape[1], k.shape[2], q.shape[2]) == (self.page_size, *self.shape)
        assert q.shape[0] == sum(self.q_lens) and out.shape == q.shape
        indptr, indices, last = self.arrays
        row = 0
        for i, q_len in enumerate(self.q_lens):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            length = max(len(pages) - 1, 0) * self.page_size + int(last[i])
            keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))
            keys, values = (x.repeat_interleave(q.shape[1] // k.shape[2], 1) for x in (keys, values))
            rows = slice(row, row + q_len)
            row += q_len
            scores = torch.einsum("qhd,khd->qhk", q[rows].double(), keys) * self.sm_scale
            if self.causal:
                hidden = torch.ones(q_len, length).triu(length - q_len + 1).bool()
                scores = scores.masked_fill(hidden[:, None], -math.inf)
            out[rows] = torch.einsum("qhk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), values).to(out.dtype)
            if return_lse:
                lse[rows] = (scores.logsumexp(-1) / math.log(2)).float()
        return (out, lse) if return_lse else out


class _Decode(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        assert kv_layout == "NHD" and use_tensor_cores and backend == "fa2"
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert all((x is not None) == use_cuda_graph for x in buffers)
        self.buffers = buffers if use_cuda_graph else None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.log("plan", args, kwargs)
        self._plan(*args, **kwargs)

    def _plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        q_data_type,
        kv_data_type,
        sm_scale,
    ):
        self.page_size, self.shape, self.sm_scale = page_size, (num_qo_heads, num_kv_heads, head_dim), sm_scale
        self.q_dtype, self.kv_dtype, self.causal = q_data_type, kv_data_type, False
        self._keep(indptr, indices, last_page_len, [1] * len(last_page_len))


class _Prefill(_Wrapper):
    buffers = None

    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
        assert kv_layout == "NHD"
        self.backend = backend

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.log("plan", args, kwargs)
        self._plan(*args, **kwargs)

    def _plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        assert qo_indptr.dtype == torch.int32 and len(qo_indptr) == len(paged_kv_indptr)
        self.page_size, self.shape, self.sm_scale = page_size, (num_qo_heads, num_kv_heads, head_dim_qk), sm_scale
        self.q_dtype, self.kv_dtype, self.causal = q_data_type, kv_data_type, causal
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, qo_indptr.diff().tolist())
