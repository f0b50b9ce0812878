"""The Triton kernel: byte for byte under its interpreter, where this file runs as a script; compiled for sm_90."""

from __future__ import annotations

import pytest
import torch

from support.triton_runs import compile_kernel, needs_triton, run_interpreted


@needs_triton
def test_the_interpreter_copies_every_byte():
    assert "transfers were exact" in run_interpreted(__file__)


@needs_triton
@pytest.mark.parametrize("divisible", [True, False], ids=["16-byte", "any alignment"])
@pytest.mark.parametrize(("pointer", "rows", "cols"), [("*i64", 16, 256), ("*i32", 8, 1024), ("*u8", 1, 32768)])
def test_it_compiles_for_sm_90(pointer: str, rows: int, cols: int, divisible: bool):
    """In a process without the interpreter. The PTX must pass L1 by on loads and, where it can, move 16 bytes."""
    from sgl_kernel.kvcacheio.triton_kernels import NUM_WARPS, copy_pages_kernel

    names = copy_pages_kernel.arg_names
    pointers = {"src_ptr": pointer, "dst_ptr": pointer, "src_pages_ptr": "*i64", "dst_pages_ptr": "*i64"}
    types = {name: pointers.get(name, "i32" if name.startswith("num_") else "i64") for name in names}
    aligned = ("src_ptr", "dst_ptr", "run_words", *(n for n in names if n.endswith("stride"))) if divisible else ()
    constants = {"ROWS": rows, "COLS": cols}
    ptx = compile_kernel(copy_pages_kernel, types, constants, aligned, NUM_WARPS).asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global.cg" in line]
    stores = [line for line in ptx.splitlines() if "st.global.cs" in line]
    assert loads and stores, ptx
    wide = {"*i64": ".v2.b64", "*i32": ".v4.b32", "*u8": ".v4.b32"}[pointer]
    assert all(wide in line for line in loads + stores) == divisible, loads + stores


def main() -> None:
    import numpy as np

    from sgl_kernel.kvcacheio import triton_kernels
    from support.kv_model import Pool, expected, index_patterns

    count = 0
    # Small tiles: several rows, several steps over the columns, tails in both directions.
    for seed, (tile_bytes, page_size, dtype, shapes) in enumerate(
        [
            (256, 1, torch.bfloat16, {}),
            (64, 3, torch.float32, {}),
            (32, 16, torch.float16, {}),
            (128, 2, torch.float64, {}),
            (16, 1, torch.uint8, {"k_shape": (3, 5)}),
            (64, 2, torch.float8_e4m3fn, {"k_shape": (1, 7)}),
            (64, 2, torch.bfloat16, {"k_shape": (2, 6), "v_shape": (2, 3)}),
            (triton_kernels.TILE_BYTES, 64, torch.bfloat16, {}),
        ]
    ):
        triton_kernels.TILE_BYTES = tile_bytes
        rng = np.random.default_rng(seed)
        routes = [("page_first", "layer_first"), ("layer_first", "page_first")]
        if "v_shape" not in shapes:
            routes += [("page_first", "block_major"), ("block_major", "layer_first")]
        for from_layout, to_layout in routes:
            for what, src_pages, dst_pages in index_patterns(rng, 7, 8, 5):
                if what not in ("scattered", "runs", "one source many times"):
                    continue
                src = Pool(from_layout, 7, 2, page_size, dtype, seed, **shapes)
                dst = Pool(to_layout, 8, 2, page_size, dtype, seed + 1, **shapes)
                result = expected(src, dst, src_pages, dst_pages)
                ids = torch.tensor(src_pages), torch.tensor(dst_pages)
                triton_kernels.copy_pages(src.pages, dst.pages, *ids, num_warps=8 * (1 + seed % 3))
                assert np.array_equal(dst.raw(), result), (tile_bytes, page_size, dtype, from_layout, to_layout, what)
                count += 1
    print(f"{count} transfers were exact")


if __name__ == "__main__":
    main()
