/* The product of a tile of rows with a panel, summed in registers. Shared by cpu_linear.c and cpu_extend.c. */

#ifndef SGL_CPU_TILE_H
#define SGL_CPU_TILE_H

#include "cpu_vector.h"

/* Columns of a panel, and most rows of a tile. */
#define PANEL (2 * LANES)
#if LANES == 16
#define ROWS 12
#else
#define ROWS 6
#endif
/* How far ahead a panel is fetched into the first-level cache, in its rows. */
#ifndef PANEL_AHEAD
#define PANEL_AHEAD 16
#endif

/* A row of a panel: PANEL floats. Halved, LANES words: of each the lower half is the upper half of column i's float, and
   the upper one that of column LANES + i's; the floats' lower halves are 0. */
#define ROW_WORDS(halved) ((halved) ? LANES : PANEL)

INLINE void load_row(const float *row, int halved, vec *a, vec *b) {
    *a = load(row);
    if (halved) {
        ivec both = (ivec)*a;
        *a = (vec)(both << 16);
        *b = (vec)(both & (int32_t)0xFFFF0000);
    } else {
        *b = load(row + LANES);
    }
}

/* acc[r] += the sum over i of x[r][i] * panel[i], one chain of additions per number, in order. x: (rows, k), rows
   x_stride apart. panel: k rows. later: words as far apart as those, which are fetched meanwhile, one for each of them;
   NULL for none. rows, halved, and whether there is `later`, are constants where this is inlined. */
INLINE void add_product(int rows, const float *x, int64_t x_stride, const float *panel, int halved, int64_t k,
                        const float *later, vec acc[ROWS][2]) {
    const int words = ROW_WORDS(halved);
    for (int64_t i = 0; i < k; i++, panel += words) {
        vec a, b;
        load_row(panel, halved, &a, &b);
        if (later)
            fetch(later + i * words, 1);
        __builtin_prefetch(panel + PANEL_AHEAD * words);
        if (words > 16)
            __builtin_prefetch(panel + PANEL_AHEAD * words + 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vec each = splat(x[r * x_stride + i]);
            acc[r][0] += each * a;
            acc[r][1] += each * b;
        }
    }
}

/* A switch with a case of its own for each number of rows. */
#if ROWS == 12
#define SWITCH_ROWS(rows, CASE)                                                                                        \
    switch (rows) {                                                                                                    \
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)             \
    }
#else
#define SWITCH_ROWS(rows, CASE)                                                                                        \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#endif

#endif
