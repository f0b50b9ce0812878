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

/* acc[r] += the sum over i of x[r][i] * panel[i], one chain of additions per number, in order. x: (rows, k), rows
   x_stride apart. panel: (k, PANEL). later: floats PANEL apart that are fetched meanwhile, one for each of the panel's
   rows; NULL for none. rows, and whether there is `later`, are constants where this is inlined. */
INLINE void add_product(int rows, const float *x, int64_t x_stride, const float *panel, int64_t k, const float *later,
                        vec acc[ROWS][2]) {
    for (int64_t i = 0; i < k; i++, panel += PANEL) {
        vec a = load(panel), b = load(panel + LANES);
        if (later)
            fetch(later + i * PANEL, 1);
        __builtin_prefetch(panel + PANEL_AHEAD * PANEL);
        if (PANEL > 16)
            __builtin_prefetch(panel + PANEL_AHEAD * PANEL + 16);
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
