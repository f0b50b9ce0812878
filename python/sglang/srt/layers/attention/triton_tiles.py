"""What programs of the attention kernels in Triton work on at once: chosen from heads, types and a GPU's memory.

Owns no state, and imports no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton

# That a program may have, of an H100, an A100 and an L4. Older GPUs have less.
HOPPER_SHARED_BYTES, AMPERE_SHARED_BYTES, ADA_SHARED_BYTES = 227 << 10, 163 << 10, 99 << 10


@dataclass(frozen=True)
class Heads:
    """Of a rank's queries and KV."""

    num_kv_heads: int
    # Query heads that share a KV head.
    group: int


@dataclass(frozen=True)
class ExtendTile:
    """Queries and keys that a program of extends works on at once, powers of two, 16 at least, and its warps."""

    queries: int = 128
    keys: int = 64
    # Where the pages of a `PagedSegments` are read, and no lse is asked for, which take more of an SM's memory.
    keys_of_pages: int = 64
    warps: int = 8
    # Programs that an SM has registers and memory for.
    per_sm: int = 1
    # The fewest keys that are given a program of their own: whole tiles.
    least_split: int = 512

    def num_blocks(self, q_lens: np.ndarray, heads: Heads) -> int:
        return int((-(-q_lens * heads.group // self.queries)).sum())

    def at_once(self, heads: Heads, num_sms: int) -> int:
        """Programs of a KV head that all SMs together hold."""
        return max(1, self.per_sm * num_sms // heads.num_kv_heads)


# 48 tokens of 4 heads are three whole blocks of 64 rows, and two of 128.
SHORT_TILE = ExtendTile(queries=64, warps=4, per_sm=2)


@dataclass(frozen=True)
class MergeTile:
    """What a program that merges splits works on at once."""

    rows: int = 16
    splits: int = 1
    # Of a row; None for all.
    values: int | None = None

    def options(self, value_dim: int) -> dict[str, int]:
        values = min(self.values or value_dim, value_dim)
        return {"BLOCK_D": max(16, triton.next_power_of_2(values)), "ROWS": self.rows, "SPLITS": self.splits}


@dataclass(frozen=True)
class Tiles:
    """What programs work on at once. short: for extends whose blocks of `extend` would fill half of a GPU at most;
    None for no other. num_stages, decode_stages: Triton's, of extends and decodes."""

    extend: ExtendTile = ExtendTile()
    short: ExtendTile | None = None
    decode_keys: int = 64
    # The most query heads of a program of decodes.
    decode_rows: int = 64
    # The fewest at which Triton holds K and V twice, so that the next keys come while these are multiplied.
    num_stages: int = 5
    decode_stages: int = 5
    # Of decodes; None for as many as rows have values for.
    warps: int | None = None
    # The fewest keys of a decode that are given a program of their own: a power of two, and whole tiles.
    least_decode_split: int = 256
    # Programs of decodes' splits beyond one each, for each SM.
    more_decodes_per_sm: int = 2
    # Tiles in one page are read by one page number.
    uses_whole_pages: bool = True
    merge: MergeTile = MergeTile()

    @classmethod
    def of(
        cls,
        head_dim: int,
        dtype: torch.dtype,
        page_size: int,
        shared_bytes: int,
        kv_dtype: torch.dtype | None = None,
        has_tensor_memory: bool = False,
    ) -> Tiles:
        """Of the tiles that fit into an SM's shared memory, of which a program may have shared_bytes, the fastest on
        an H200 with heads of 128 (docs/records/experiments.md). More keys pay where a tile is no part of a page: its
        page numbers are looked up while others are multiplied. kv_dtype: where it is not dtype. has_tensor_memory:
        see `of_latents`."""
        head_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        is_small = shared_bytes < AMPERE_SHARED_BYTES
        if head_bytes > 1024:
            queries = 32 if shared_bytes >= HOPPER_SHARED_BYTES else 16
            # Where memory is too small to hold keys twice, they are held once.
            stages = 3 if is_small else 5
            tile = ExtendTile(queries, keys=16, keys_of_pages=16)
            return cls(tile, decode_keys=16, decode_rows=16, num_stages=stages, decode_stages=stages)
        is_wide = dtype.itemsize > 2
        if is_wide and kv_dtype is not None and kv_dtype.itemsize <= 2:
            # What was widened is kept in registers: with larger tiles a thread spills up to 12 KiB, of which a GPU
            # reserves GiB. And products of more rows than 32 lose 13 bits on GPUs with tensor memory (Triton's issue
            # 10176).
            size = 32 if head_bytes <= 256 else 16
            return cls(ExtendTile(size, size, size), decode_keys=size, decode_rows=size, warps=8)
        if head_bytes > 256:
            keys = 16 if is_wide or head_bytes > 512 or shared_bytes < HOPPER_SHARED_BYTES else 32
            rows = 32 if is_wide or (head_bytes > 512 and is_small) else 64
            # More rows of decodes, which have 4 warps, spill hundreds of bytes a thread.
            decode_rows = 64 if keys == 32 else 32 if head_bytes <= 512 else 16
            return cls(ExtendTile(rows, keys=keys, keys_of_pages=keys), decode_keys=keys, decode_rows=decode_rows)
        if is_small and is_wide and head_bytes > 128:
            return cls(ExtendTile(keys=32, keys_of_pages=32))
        if shared_bytes < HOPPER_SHARED_BYTES or is_wide:
            return cls()
        if has_tensor_memory:
            # Two short ones of heads of 128 take 2 KiB more than an SM has, and 128 keys all of it.
            return cls(short=SHORT_TILE if head_bytes <= 128 else replace(SHORT_TILE, per_sm=1))
        return cls(ExtendTile(keys_of_pages=128 if page_size % ExtendTile.keys else 64), SHORT_TILE)

    @classmethod
    def of_latents(
        cls,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        group: int,
        shared_bytes: int,
        has_tensor_memory: bool = False,
    ) -> Tiles:
        """Of latents of 512 values and 64 rotated ones, or fewer; group: query heads. An SM has one program, of 64
        rows: the sums of their values take 8 warps 128 registers a thread. Decodes of fewer heads have as many rows.
        Keys are looked up one by one, which takes fewer registers than one number for a page. has_tensor_memory: as
        Blackwell's data-centre GPUs have, for whose products of 64 rows Triton takes more shared memory."""
        is_large = shared_bytes >= HOPPER_SHARED_BYTES and max(dtype.itemsize, kv_dtype.itemsize) <= 2
        rows, keys = (64, 64) if is_large else (16, 16)
        # 64 keys of 16 bits would take 346 KiB.
        keys_of_rows = 32 if is_large and has_tensor_memory and kv_dtype.itemsize == 2 else keys
        has_few_rows = is_large and triton.next_power_of_2(group) < rows
        return cls(
            ExtendTile(rows, keys_of_rows, keys_of_rows, least_split=256),
            decode_keys=keys if has_few_rows else keys_of_rows,
            decode_rows=rows,
            # The fewest at which Triton holds keys twice; with more, 64 rows of 16 bits do not fit.
            num_stages=5 if kv_dtype.itemsize == 1 else 3,
            decode_stages=5 if kv_dtype.itemsize == 1 or has_few_rows else 3,
            warps=8,
            # Parts of 64 rows take longer to write and to merge.
            least_decode_split=128 if min(group, rows) > 32 else 64,
            more_decodes_per_sm=1,
            uses_whole_pages=False,
            merge=MergeTile(rows=4, splits=16, values=128),
        )

    @classmethod
    def of_expanded(cls, shared_bytes: int) -> Tiles | None:
        """Of keys and values of 16 bits that were made of latents: at most 128 values of a head, and 64 rotated ones.
        On Hopper a program takes 232 registers a thread and 169 KiB. Ampere's products read keys from registers, too:
        there a program has half as many, and 88 KiB. None where these do not fit."""
        if shared_bytes < ADA_SHARED_BYTES:
            return None
        keys = 64 if shared_bytes >= HOPPER_SHARED_BYTES else 32
        return cls(ExtendTile(128, keys, keys))

    def pick(self, q_lens: np.ndarray, heads: Heads, num_sms: int) -> ExtendTile:
        """q_lens: of extends."""
        is_short = 2 * self.extend.num_blocks(q_lens, heads) <= self.extend.at_once(heads, num_sms)
        return self.short if self.short is not None and is_short else self.extend

    def fewest_queries(self, heads: Heads, num_sms: int) -> int | None:
        """Of a request for which `pick` does not choose the short tile; None where there is none."""
        if self.short is None:
            return None
        num_blocks = self.extend.at_once(heads, num_sms) // 2 + 1
        return (num_blocks - 1) * self.extend.queries // heads.group + 1

    def decode_warps(self, rows: int, block_d: int, dtype: torch.dtype) -> int:
        """rows: query heads of a program. Two warps have registers for 16 rows of 128 values of 16 bits."""
        if self.warps is not None:
            return self.warps
        return 2 if rows * block_d * dtype.itemsize <= 16 * 128 * 2 else 4
