/* Copies of pages between pools in host memory.

   A run is what one page has of one component in one layer: bytes without a gap. Runs may lie anywhere, so that the
   CPU does not guess the next one: it is fetched while this one is copied. */

#include <stdint.h>
#include <string.h>

/* Runs that are fetched ahead, and how much of each. What is longer the CPU finds by itself. */
#define AHEAD 4
#define FETCHED 2048
#define LINE 64

/* Where one component's runs lie: base + layer * layer_stride + page * page_stride, in bytes. */
typedef struct {
    char *base;
    int64_t layer_stride, page_stride;
} runs;

static inline __attribute__((always_inline)) void fetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE)
        __builtin_prefetch(from + at);
}

/* How many pages from the first lie one after the other on both sides. */
static int64_t adjacent(const int64_t *src_pages, const int64_t *dst_pages, int64_t n) {
    int64_t count = 1;
    while (count < n && src_pages[count] == src_pages[0] + count && dst_pages[count] == dst_pages[0] + count)
        count++;
    return count;
}

/* dst[layer, dst_pages[i]] = src[layer, src_pages[i]]. run: bytes. Page after page, as the layers of a page lie together
   in the host's pool. Pages without gaps between their runs on both sides are copied together. */
void cpu_copy_pages(const runs *src, const runs *dst, const int64_t *src_pages, const int64_t *dst_pages, int64_t n,
                    int64_t layers, int64_t run) {
    int64_t fetched = run < FETCHED ? run : FETCHED, count = 1;
    int joins = src->page_stride == run && dst->page_stride == run;
    for (int64_t i = 0; i < n; i += count) {
        const char *from = src->base + src_pages[i] * src->page_stride;
        char *to = dst->base + dst_pages[i] * dst->page_stride;
        int64_t next_page = i + AHEAD / layers, next_layer = AHEAD % layers;
        if (joins)
            count = adjacent(src_pages + i, dst_pages + i, n - i);
        for (int64_t layer = 0; layer < layers; layer++) {
            if (next_page < n)
                fetch(src->base + src_pages[next_page] * src->page_stride + next_layer * src->layer_stride, fetched);
            if (++next_layer == layers)
                next_layer = 0, next_page++;
            memcpy(to + layer * dst->layer_stride, from + layer * src->layer_stride, count * run);
        }
    }
}
