/* Libraries that the plane loads when it starts, so that it builds without their headers: on Debian and Ubuntu they are
 * libxxhash0, libzstd1 and libssl3, of which the package manager itself needs the first two. */
#include "plane.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static struct {
    uint64_t (*xxh3)(const void *, size_t);
    void *(*zstd_new)(void);
    size_t (*zstd_free)(void *);
    size_t (*zstd_decode)(void *, void *, size_t, const void *, size_t);
    unsigned (*zstd_is_error)(size_t);
    void *(*hmac_new)(void);
    void (*hmac_free)(void *);
    int (*hmac_init)(void *, const void *, int, const void *, void *);
    int (*hmac_update)(void *, const unsigned char *, size_t);
    int (*hmac_final)(void *, unsigned char *, unsigned *);
    const void *(*sha256)(void);
} library;

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *open_first(const char *const *names)
{
    void *handle = NULL;
    for (; *names && !handle; names++)
        handle = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
    return handle;
}

/* POSIX has it that functions come as data pointers. */
static void find(void *handle, const char *name, void *function)
{
    void *found = handle ? dlsym(handle, name) : NULL;
    memcpy(function, &found, sizeof found);
}

static void load(void)
{
    void *xxhash = open_first((const char *const[]){"libxxhash.so.0", "libxxhash.so", NULL});
    void *zstd = open_first((const char *const[]){"libzstd.so.1", "libzstd.so", NULL});
    void *crypto = open_first((const char *const[]){"libcrypto.so.3", "libcrypto.so.1.1", NULL});
    find(xxhash, "XXH3_64bits", &library.xxh3);
    find(zstd, "ZSTD_createDCtx", &library.zstd_new);
    find(zstd, "ZSTD_freeDCtx", &library.zstd_free);
    find(zstd, "ZSTD_decompressDCtx", &library.zstd_decode);
    find(zstd, "ZSTD_isError", &library.zstd_is_error);
    find(crypto, "HMAC_CTX_new", &library.hmac_new);
    find(crypto, "HMAC_CTX_free", &library.hmac_free);
    find(crypto, "HMAC_Init_ex", &library.hmac_init);
    find(crypto, "HMAC_Update", &library.hmac_update);
    find(crypto, "HMAC_Final", &library.hmac_final);
    find(crypto, "EVP_sha256", &library.sha256);
}

bool has_xxhash(void)
{
    pthread_once(&once, load);
    return library.xxh3;
}

bool has_zstd(void)
{
    pthread_once(&once, load);
    return library.zstd_new && library.zstd_free && library.zstd_decode && library.zstd_is_error;
}

bool has_hmac(void)
{
    pthread_once(&once, load);
    return library.hmac_new && library.hmac_free && library.hmac_init && library.hmac_update && library.hmac_final &&
           library.sha256;
}

uint64_t xxh3(const void *data, size_t size)
{
    return library.xxh3(data, size);
}

void *new_zstd_context(void)
{
    return has_zstd() ? library.zstd_new() : NULL;
}

void free_zstd_context(void *context)
{
    if (context)
        library.zstd_free(context);
}

bool zstd_decode(void *context, const uint8_t *in, size_t n, uint8_t *out, size_t size)
{
    size_t decoded = library.zstd_decode(context, out, size, in, n);
    return !library.zstd_is_error(decoded) && decoded == size;
}

void hmac_tag(const uint8_t key[MAC_KEY_BYTES], const struct span *spans, int num_spans, uint8_t tag[TAG_BYTES])
{
    uint8_t digest[64];
    unsigned size = 0;
    void *context = library.hmac_new();
    bool ok = context && library.hmac_init(context, key, MAC_KEY_BYTES, library.sha256(), NULL);
    for (int i = 0; ok && i < num_spans; i++)
        ok = library.hmac_update(context, spans[i].data, spans[i].size);
    if (!ok || !library.hmac_final(context, digest, &size))
        abort(); /* only without memory */
    library.hmac_free(context);
    memcpy(tag, digest, TAG_BYTES);
}
