"""`csrc/cpu_copy.c`: a copy in host memory without Python per page, and without the GIL.

Runs in the calling thread; the copy is done on return. Arguments have been checked (`layout.check_fit`,
`layout.check_indices`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from sgl_kernel.cpu.library import function
from sgl_kernel.kvcacheio import reference
from sgl_kernel.kvcacheio.layout import Addresses, KVPages, addresses, page_is_one_run


class _Runs(ctypes.Structure):
    """`runs` of cpu_copy.c."""

    _fields_ = (("base", ctypes.c_void_p), ("layer_stride", ctypes.c_int64), ("page_stride", ctypes.c_int64))


def copy_pages(src: KVPages, dst: KVPages, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    """See `reference.copy_pages`, which also copies pages that have gaps."""
    if not all(page_is_one_run(each) for each in (*src.components, *dst.components)):
        reference.copy_pages(src, dst, src_pages, dst_pages)
        return
    copy = function("cpu_copy_pages")
    src_pages, dst_pages = (pages.to(torch.int64).contiguous() for pages in (src_pages, dst_pages))
    for s, d, run_bytes in zip(addresses(src), addresses(dst), src.run_bytes):
        copy(
            _runs(s),
            _runs(d),
            src_pages.data_ptr(),
            dst_pages.data_ptr(),
            len(src_pages),
            src.num_layers,
            run_bytes,
        )


def _runs(at: Addresses) -> Any:
    return ctypes.byref(_Runs(at.base, at.layer_stride, at.page_stride))
