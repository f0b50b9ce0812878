/* The data plane of the offload proxy: pieces of KV from a store through four stages to an engine's memory.
 *
 *     receive        decompress     dequantize             deliver
 *     store -> slot  slot -> slot   slot -> slot, or the   slot -> the engine's pages, or frames to its relay
 *                                   engine's pages
 *
 * Threads of each stage take pieces from a ring and put them into the next one's. A piece holds a slot of each buffer
 * from the stage that fills it to the stage that has read it. A stage without a free slot waits for later stages, and
 * never for earlier ones; so the plane cannot lock up, and a fetch may be larger than all buffers.
 *
 * Sessions, connections to servers and every decision are the control plane's, which is elsewhere and speaks
 * control.c's messages. Nothing that a store sends is trusted: piece.c.
 */
#ifndef KVPLANE_H
#define KVPLANE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum stage { RECEIVE, DECOMPRESS, DEQUANTIZE, DELIVER, NUM_STAGES };
enum buffer { COMPRESSED, DECOMPRESSED, DEQUANTIZED, NUM_BUFFERS };
enum codec { RAW = 1, LOSSLESS, BINNED }; /* also the ids in headers */
enum coder { NO_CODER, ZSTD, DEFLATE };
enum dtype { OTHER_DTYPE, BFLOAT16, FLOAT16, FLOAT32 };

#define KEY_BYTES 16
#define HEADER_BYTES 64
#define TAG_BYTES 16
#define MAC_KEY_BYTES 32
#define MAX_PIECE_BYTES (2 << 20)
/* A piece that does not shrink is stored as it is, between its header and a tag. */
#define SLOT_BYTES (MAX_PIECE_BYTES + 4096)
#define HASH_SLOTS 16384
#define MAX_PREFIX_BYTES 64
/* Pieces that a receiving thread has asked for at a time. */
#define MAX_ASKED 64
/* Pieces that an accelerator has at a time. */
#define MAX_FLYING 8
#define REASON_BYTES 160

/* ---- libraries.c: zstd, xxHash and HMAC-SHA256, loaded at run time ---- */

bool has_zstd(void);
bool has_hmac(void);
bool has_xxhash(void);
uint64_t xxh3(const void *data, size_t size);
void *new_zstd_context(void);
void free_zstd_context(void *context);
/* Whether the n bytes are one whole stream of exactly size bytes. */
bool zstd_decode(void *context, const uint8_t *in, size_t n, uint8_t *out, size_t size);
struct span {
    const void *data;
    size_t size;
};
/* The first TAG_BYTES of the HMAC of all spans. */
void hmac_tag(const uint8_t key[MAC_KEY_BYTES], const struct span *spans, int num_spans, uint8_t tag[TAG_BYTES]);

/* ---- clock.c ---- */

struct rate { /* of a link, or of an accelerator that works on one piece after another */
    pthread_mutex_t lock;
    double free_at, bytes_per_s;
};

double now(void); /* in seconds */
/* When so many bytes have been moved at a rate, behind those before, if they began then. */
double end_at_rate(struct rate *rate, double began, uint64_t bytes);
/* least: of one sleep. */
void sleep_until(double end, double least);

/* ---- slots.c ---- */

struct slot {
    uint8_t *memory;
    struct slot *next;
};

struct slots {
    pthread_mutex_t lock;
    pthread_cond_t freed;
    struct slot *free, *all;
    uint8_t *memory;
    int num, num_free;
    size_t slot_bytes;
    bool is_fresh, is_shut; /* is_fresh: the baseline that maps memory for each piece */
    uint64_t *used;         /* a counter */
};

bool make_slots(struct slots *slots, int num, size_t slot_bytes, bool is_fresh, uint64_t *used);
void shut_slots(struct slots *slots); /* who waits gets none */
void free_slots(struct slots *slots);
/* NULL if none is free within seconds. */
struct slot *take_slot(struct slots *slots, double seconds);
void give_slot(struct slots *slots, struct slot *slot);

/* ---- pieces ---- */

struct piece {
    struct piece *next;
    struct fetch *fetch;
    uint32_t block, index;
    struct slot *slots[NUM_BUFFERS];
    uint8_t *brought; /* memory of its own, for a piece that the control plane has brought */
    const uint8_t *header, *payload, *tag; /* as stored; they need not lie in one run */
    size_t stored_bytes;
    bool is_checked, is_plain; /* is_plain: stored without coding */
    bool is_dependent;         /* counted in num_dependent */
    uint8_t *out;  /* where it is dequantized to; in a slot, unless it is in the engine's pages */
    bool is_in_place;
    double begun_at, done_at; /* done_at: of an emulated accelerator */
};

struct ring {
    pthread_mutex_t lock;
    pthread_cond_t filled, emptied;
    struct piece **pieces;
    int capacity, first, num;
    bool is_shut;
    uint64_t *queued; /* a counter */
};

bool make_ring(struct ring *ring, int capacity, uint64_t *queued);
void shut_ring(struct ring *ring); /* who waits gets none */
void free_ring(struct ring *ring);
void put_piece(struct ring *ring, struct piece *piece);
/* NULL if none comes within seconds. */
struct piece *get_piece(struct ring *ring, double seconds);

/* ---- sessions ---- */

struct connection {
    struct session *session;
    uint32_t node;
    int fd;
    int num_asked;     /* replies that are still to come */
    uint64_t asked_bytes;
    double deadline;   /* of the next reply */
    bool has_answered;
    uint8_t *in;       /* bytes from start to end were read and not used */
    size_t start, end;
    uint8_t *out;      /* commands that are to be sent */
    size_t out_bytes, out_room;
};

/* What a receiving thread has of a session. */
struct session_thread {
    struct connection **connections; /* by node */
    uint32_t num_connections;
    /* Of the piece that waits for a connection, if one does. */
    bool is_waiting, is_answered, is_refused;
    uint32_t hash_slot;
};

struct session {
    struct session *next;
    struct plane *plane;
    uint32_t id;
    int num_open; /* fetches that have not ended */
    enum codec codec;
    enum coder coder;
    enum dtype dtype;
    uint32_t value_bytes, head_dim;
    uint64_t fingerprint;
    uint64_t block_bytes;
    uint32_t piece_bytes, num_pieces;
    uint32_t page_bytes, num_pages, pages_per_block;
    uint32_t ttl_s;
    double timeout_s;
    uint8_t mac_key[MAC_KEY_BYTES];
    bool has_mac;
    char prefix[MAX_PREFIX_BYTES + 1];
    int16_t node_of[HASH_SLOTS]; /* -1: not known */
    struct session_thread *threads;
    /* Its pieces that wait for others: for the store's reply, or, until they are delivered, for an engine that can
     * stall. */
    int num_dependent;
    const struct destination *destination;
    /* Of pages in shared memory. */
    uint8_t *pool;
    size_t pool_bytes;
    int engine_fd; /* held open until the last write to its pages */
    /* Of frames: frames.c. */
    struct sender *sender;
};

struct fetch {
    struct fetch *next;
    struct session *session;
    uint64_t operation;
    uint32_t num_blocks;
    uint8_t *keys;
    uint16_t *hash_slots;
    int32_t *pages; /* (num_blocks, pages_per_block); of frames NULL */
    uint32_t *missing; /* pieces of each block that have not come */
    /* Blocks from this one on are given up. */
    uint32_t limit;
    uint64_t next_piece, num_under_way;
    uint64_t num_read, num_missing, bytes_read;
    bool is_over;
};

/* Where pieces are delivered. An accelerator's is another one of these (docs/design/remote.md). */
struct destination {
    /* Whether the other side decides when what was submitted is delivered. */
    bool can_stall;
    /* Memory that becomes the piece without a delivery; NULL where there is none, and the caller fills a slot. */
    uint8_t *(*window)(struct piece *piece);
    /* Deliver piece->out, which stays as it is until then: deliver_ended follows, from any thread, perhaps before this returns. */
    void (*submit)(struct piece *piece);
};

extern const struct destination POOL, FRAMES;

/* As offload/frames.py has it. block, start, operation: of data. */
struct frame_header {
    uint32_t size, block, start;
    uint8_t kind, zero[3];
    uint64_t operation;
} __attribute__((packed));
enum { MESSAGE_FRAME, DATA_FRAME };

struct sender *new_sender(struct session *session, int fd, const uint8_t key[MAC_KEY_BYTES], uint64_t number);
void send_message(struct sender *sender, const uint8_t *payload, size_t size);
void free_sender(struct sender *sender); /* after the messages that wait */

/* ---- piece.c ---- */

/* NULL, or why it is not the piece that it should be. */
const char *check_piece(struct piece *piece, char reason[REASON_BYTES]);
/* Whether it has a right header, but of another block or place: it is the reply to another question. */
bool is_of_another(const struct piece *piece);
uint32_t raw_bytes_of(const struct session *session, uint32_t index);
uint32_t mid_bytes_of(const struct session *session, uint32_t raw_bytes);
const char *decompress_piece(struct piece *piece, void *zstd_context, uint8_t *mid);
const char *dequantize_piece(struct piece *piece, const uint8_t *mid, uint8_t *out);

/* ---- store.c ---- */

/* From TIMED_OUT on the connection has failed. */
enum reply { VALUE, NONE, ERROR_REPLY, REDIRECTED, TOO_LARGE, TIMED_OUT, CLOSED, SYSTEM_ERROR, NOT_A_REPLY, NOT_THE_MASTER,
             UNASKED /* the reply to another question, or to none */ };

struct connection *new_connection(struct session *session, uint32_t node, int fd);
void free_connection(struct connection *connection);
/* Whether bytes have come that were not asked for. */
bool has_unasked(const struct connection *connection);
void ask_piece(struct connection *connection, const struct fetch *fetch, uint32_t block, uint32_t index);
/* VALUE, or how it failed. error: of the system. */
enum reply send_asked(struct connection *connection, int *error);
struct area {
    uint8_t *memory;
    size_t size;
};
/* A value to the areas, one after another. Of a VALUE its size, in `size`; of an error, and of what is no reply, its
 * text. */
enum reply receive_value(struct connection *connection, const struct area *areas, int num_areas, size_t *size,
                         char text[REASON_BYTES], int *error);

/* ---- pipeline.c ---- */

struct settings {
    uint32_t threads[NUM_STAGES], slots[NUM_BUFFERS], window, is_direct, is_pipelined, is_preallocated;
    double rates[NUM_STAGES]; /* bytes per second of an emulated accelerator; 0: as fast as it can */
    double poll_s, read_limit;
    uint16_t *cores[NUM_STAGES];
    uint32_t num_cores[NUM_STAGES];
};

/* Counters that the control plane reads in shared memory. us: at work, without waits for a slot. */
struct counters {
    uint64_t bytes[NUM_STAGES], pieces[NUM_STAGES], us[NUM_STAGES], queued[NUM_STAGES];
    uint64_t slots[NUM_BUFFERS], slots_used[NUM_BUFFERS];
    uint64_t is_reading; /* whether a piece waits to be received, and may be */
};

/* How the work of decompress, dequantize and deliver is done: engines.c. Several pieces are begun before the first is
 * done, and they end in order. */
struct engine {
    /* Begin a stage on a piece, whose slots and `out` are set. Returns NULL, or why the piece is damaged. */
    const char *(*begin)(struct plane *plane, enum stage stage, struct piece *piece, void *zstd_context);
    /* Seconds until it may be done; 0 or less: it is. */
    double (*seconds_left)(const struct piece *piece);
};

extern const struct engine SOFTWARE, EMULATED;

struct worker {
    struct plane *plane;
    enum stage stage;
    int index;
    pthread_t thread;
};

struct plane {
    int control;
    bool is_refused; /* it cannot work with its settings */
    struct settings settings;
    const struct engine *engine;
    struct counters *counters;
    struct slots slots[NUM_BUFFERS];
    struct ring rings[NUM_STAGES];
    struct rate rates[NUM_STAGES], read_limit;
    struct worker *workers;
    int num_workers; /* those that run */
    int *wakes; /* an eventfd of each receiving thread: there may be work */
    int num_slots; /* of the smallest buffer */
    /* Held for everything below, and for fetches and sessions. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_stopping;
    struct session *sessions;
    struct fetch *fetches, **last_fetch;
    int num_dependent;
    /* Without pipelining: pieces of the current block that have not ended; those of it that no thread has; and those
     * that wait for the others before the next stage. */
    int num_together, num_untaken, num_parked, together_room;
    struct piece **untaken, **parked;
    enum stage parked_for;
    /* Events to the control plane, one at a time. */
    pthread_mutex_t event_lock;
};

/* Returns why it cannot work, or "". */
const char *start_pipeline(struct plane *plane);
/* After all sessions have been closed, or after a start that failed. */
void stop_pipeline(struct plane *plane);
void count_work(struct plane *plane, enum stage stage, uint64_t pieces, uint64_t bytes, double seconds);

/* ---- receive.c ---- */

void *run_receiver(struct worker *worker);
/* There may be work. */
void wake_receiver(struct plane *plane, uint32_t thread);
void wake_receivers(struct plane *plane);

/* ---- fetches.c ---- */

enum bad { DAMAGED, INCOMPLETE, REFUSED };

void submit_fetch(struct plane *plane, struct fetch *fetch);
void give_up(struct plane *plane, struct session *session, uint64_t operation);
/* After the control plane has the ends of all its fetches. */
void close_session(struct session *session);
/* A piece that the control plane has brought, malloc'ed; NULL: it has not. */
void bring_piece(struct plane *plane, struct fetch *fetch, uint32_t block, uint32_t index, uint8_t *bytes, size_t size);
/* These six with plane->lock. */
bool has_more(const struct fetch *fetch);
bool may_take(const struct plane *plane, const struct fetch *fetch);
struct piece *take_piece(struct fetch *fetch);
/* That a piece waits for others, or does not any more. */
void set_dependent(struct piece *piece, bool is_dependent);
void note_reading(struct plane *plane);
bool is_wanted(const struct piece *piece);
void release_slot(struct plane *plane, struct piece *piece, enum buffer buffer);
/* To the ring of a stage; without pipelining, once all pieces of the block are there. */
void pass_on(struct plane *plane, struct piece *piece, enum stage stage);
void end_piece(struct piece *piece, bool ok);
/* The block is bad, which the control plane is told. */
void fail_piece(struct piece *piece, enum bad kind, const char *text);
void deliver_ended(struct piece *piece, bool is_delivered);

/* ---- control.c ---- */

/* Serve the control plane at this socket until it closes its side. Returns 0, or 1 after what is no message. is_program:
 * then end the process, with all that its threads do. */
int kvplane_run(int control, int is_program);

void tell_need(struct session *session, uint32_t thread, uint32_t hash_slot);
void tell_end(const struct fetch *fetch, uint32_t count);
void tell_bad(const struct piece *piece, enum bad kind, const char *text);
void tell_failed(struct session *session, uint32_t thread, uint32_t node, enum reply how, int error, bool has_answered,
                 const char *text);
void tell_redirected(const struct piece *piece);
void tell_link_ended(struct session *session);

/* kvcodec.c and inflate.c */
void kvcodec_merge2(const uint8_t *first, const uint8_t *rest, int64_t n, void *out);
void kvcodec_merge4(const uint8_t *first, const uint8_t *rest, int64_t n, void *out);
void kvcodec_unbin_bfloat16(const void *scales, const int8_t *codes, int64_t num_vectors, int64_t dim, void *out);
void kvcodec_unbin_float16(const void *scales, const int8_t *codes, int64_t num_vectors, int64_t dim, void *out);
void kvcodec_unbin_float32(const void *scales, const int8_t *codes, int64_t num_vectors, int64_t dim, void *out);
int kvcodec_inflate(const uint8_t *in, int64_t n, uint8_t *out, int64_t size);

#endif
