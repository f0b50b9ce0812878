/* What does the work of a stage: libraries and loops on the stage's threads; and an emulated accelerator, which does it
 * so too, and takes at least as long as one that works on one piece after another. The shape of a pipeline that it shows
 * is emulated, not measured. An accelerator's engine is another one of these (docs/design/remote.md). */
#include "plane.h"

static const char *work(struct plane *plane, enum stage stage, struct piece *piece, void *zstd_context)
{
    (void)plane;
    if (stage == DECOMPRESS && !piece->is_plain)
        return decompress_piece(piece, zstd_context, piece->slots[DECOMPRESSED]->memory);
    if (stage == DEQUANTIZE)
        return dequantize_piece(piece, piece->slots[DECOMPRESSED]->memory, piece->out);
    return NULL;
}

static double no_time(const struct piece *piece)
{
    (void)piece;
    return 0;
}

const struct engine SOFTWARE = {work, no_time};

static const char *emulate(struct plane *plane, enum stage stage, struct piece *piece, void *zstd_context)
{
    const struct session *session = piece->fetch->session;
    uint32_t bytes = raw_bytes_of(session, piece->index);
    double began = now();
    const char *why = work(plane, stage, piece, zstd_context);
    if (stage == DECOMPRESS)
        bytes = piece->is_plain ? 0 : mid_bytes_of(session, bytes);
    bool is_idle = !plane->rates[stage].bytes_per_s || (stage == DELIVER && piece->is_in_place);
    piece->done_at = is_idle ? 0 : end_at_rate(&plane->rates[stage], began, bytes);
    return why;
}

static double time_left(const struct piece *piece)
{
    return piece->done_at - now();
}

const struct engine EMULATED = {emulate, time_left};
