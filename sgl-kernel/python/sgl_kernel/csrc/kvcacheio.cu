// Copies of KV pages between pools, for the few warps of GPU-assisted I/O (Strata 4.2).
//
// A run (K or V of one page and one layer) is cut into segments of 512 bytes, 16 for each lane. A warp takes eight
// segments at a time, of one run or of several: each of eight lanes finds the addresses of one, and all lanes load
// eight times before they store. By Little's law 64 warps keep 256 KiB on the way, twice what covers the latency of a
// PCIe 5 link, because warps wait for loads and store by turns. A block has 256 threads, so that it does not need a
// multiprocessor for itself. Loads and stores stay out of the caches that the model's kernels use: L1 is not
// allocated, stored lines are the first to be evicted from L2.
//
// Compiled by NVRTC at run time and by nvcc in the tests; includes nothing.

struct alignas(16) Vec {
    unsigned int x, y, z, w;
};

__device__ __forceinline__ Vec load_vec(const char* p) {
    Vec v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ void store_vec(char* p, Vec v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ unsigned int load_word(const char* p) {
    unsigned int v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ void store_word(char* p, unsigned int v) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ unsigned char load_byte(const char* p) {
    unsigned int v;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return static_cast<unsigned char>(v);
}

__device__ __forceinline__ void store_byte(char* p, unsigned char v) {
    asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(p), "r"(static_cast<unsigned int>(v)) : "memory");
}

// The warp copies size bytes, with the widest accesses that both addresses allow.
__device__ __forceinline__ void copy_segment(const char* src, char* dst, int size, int lane) {
    const unsigned long long both = reinterpret_cast<unsigned long long>(src) | reinterpret_cast<unsigned long long>(dst);
    int done = 0;
    if ((both & 15) == 0) {
        for (int at = lane * 16; at + 16 <= size; at += 32 * 16) store_vec(dst + at, load_vec(src + at));
        done = size & ~15;
    } else if ((both & 3) == 0) {
        for (int at = lane * 4; at + 4 <= size; at += 32 * 4) store_word(dst + at, load_word(src + at));
        done = size & ~3;
    }
    for (int at = done + lane; at < size; at += 32) store_byte(dst + at, load_byte(src + at));
}

constexpr unsigned int SEGMENTS_AT_ONCE = 8;

// What is to be copied. Run (kv, layer, page) lies at base_kv + layer * layer_stride_kv + page * page_stride_kv, in
// bytes. Segments of a page and layer: k_segments of K, then v_segments of V; all but the last of a run are
// segment_bytes long. num_segments, of all pages and of num_layers layers from first_layer on, is below 2^31.
struct Copy {
    const char *src_k, *src_v;
    char *dst_k, *dst_v;
    const long long *src_pages, *dst_pages;
    long long src_layer_stride_k, src_page_stride_k, src_layer_stride_v, src_page_stride_v;
    long long dst_layer_stride_k, dst_page_stride_k, dst_layer_stride_v, dst_page_stride_v;
    long long k_bytes, v_bytes;
    int num_layers, k_segments, v_segments, segment_bytes, num_segments, first_layer;
};

// Kernels take it field by field.
#define COPY_PARAMETERS                                                                                          \
    const char *src_k, const char *src_v, char *dst_k, char *dst_v, const long long *src_pages,                  \
    const long long *dst_pages, long long src_layer_stride_k, long long src_page_stride_k,                       \
    long long src_layer_stride_v, long long src_page_stride_v, long long dst_layer_stride_k,                     \
    long long dst_page_stride_k, long long dst_layer_stride_v, long long dst_page_stride_v, long long k_bytes,   \
    long long v_bytes, int num_layers, int k_segments, int v_segments, int segment_bytes, int num_segments
#define COPY_ARGUMENTS                                                                                           \
    {src_k, src_v, dst_k, dst_v, src_pages, dst_pages, src_layer_stride_k, src_page_stride_k,                    \
     src_layer_stride_v, src_page_stride_v, dst_layer_stride_k, dst_page_stride_k, dst_layer_stride_v,           \
     dst_page_stride_v, k_bytes, v_bytes, num_layers, k_segments, v_segments, segment_bytes, num_segments, 0}

struct Segment {
    const char* src;
    char* dst;
    int size;
};

__device__ __forceinline__ Segment segment_of(const Copy& c, unsigned int item) {
    const unsigned int per_layer = c.k_segments + c.v_segments;
    const unsigned int per_page = per_layer * c.num_layers;
    const unsigned int index = item / per_page;
    const unsigned int in_page = item - index * per_page;
    const unsigned int in_group = in_page / per_layer;
    const unsigned int in_layer = in_page - in_group * per_layer;
    const unsigned int layer = c.first_layer + in_group;
    const bool is_v = in_layer >= c.k_segments;
    const long long start = static_cast<long long>(is_v ? in_layer - c.k_segments : in_layer) * c.segment_bytes;
    const long long left = (is_v ? c.v_bytes : c.k_bytes) - start;
    const long long src_page = c.src_pages[index], dst_page = c.dst_pages[index];
    Segment s;
    s.src = start + (is_v ? c.src_v + layer * c.src_layer_stride_v + src_page * c.src_page_stride_v
                          : c.src_k + layer * c.src_layer_stride_k + src_page * c.src_page_stride_k);
    s.dst = start + (is_v ? c.dst_v + layer * c.dst_layer_stride_v + dst_page * c.dst_page_stride_v
                          : c.dst_k + layer * c.dst_layer_stride_k + dst_page * c.dst_page_stride_k);
    s.size = left < c.segment_bytes ? static_cast<int>(left) : c.segment_bytes;
    return s;
}

__device__ __forceinline__ unsigned long long address(const void* p) { return reinterpret_cast<unsigned long long>(p); }

// By all warps of the grid. Segments are 16 bytes for each lane.
__device__ __forceinline__ void copy_segments(const Copy& copy) {
    constexpr unsigned int ALL_LANES = 0xffffffff;
    const int lane = threadIdx.x & 31;
    const unsigned int warp = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const unsigned int step = gridDim.x * (blockDim.x >> 5) * SEGMENTS_AT_ONCE;
    // Neighbouring warps take neighbouring segments: on the page-first side they make one sequential stream.
    for (unsigned int first = warp * SEGMENTS_AT_ONCE; first < copy.num_segments; first += step) {
        // Of segment first + lane; of no bytes where there is none.
        Segment mine = {copy.src_k, copy.dst_k, 0};
        const unsigned int item = first + lane;
        if (lane < SEGMENTS_AT_ONCE && item < copy.num_segments) mine = segment_of(copy, item);
        const unsigned long long from = address(mine.src), to = address(mine.dst);
        const int size = mine.size;
        if (__all_sync(ALL_LANES, size == 0 || ((from | to | size) & 15) == 0)) {
            Vec v[SEGMENTS_AT_ONCE];
            const int at = lane * 16;
#pragma unroll
            for (int i = 0; i < SEGMENTS_AT_ONCE; ++i) {
                const char* p = reinterpret_cast<const char*>(__shfl_sync(ALL_LANES, from, i));
                if (at < __shfl_sync(ALL_LANES, size, i)) v[i] = load_vec(p + at);
            }
#pragma unroll
            for (int i = 0; i < SEGMENTS_AT_ONCE; ++i) {
                char* p = reinterpret_cast<char*>(__shfl_sync(ALL_LANES, to, i));
                if (at < __shfl_sync(ALL_LANES, size, i)) store_vec(p + at, v[i]);
            }
        } else {
            for (int i = 0; i < SEGMENTS_AT_ONCE; ++i) {
                const char* p = reinterpret_cast<const char*>(__shfl_sync(ALL_LANES, from, i));
                char* q = reinterpret_cast<char*>(__shfl_sync(ALL_LANES, to, i));
                copy_segment(p, q, __shfl_sync(ALL_LANES, size, i), lane);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) sgl_kv_copy_pages(COPY_PARAMETERS) {
    const Copy copy = COPY_ARGUMENTS;
    copy_segments(copy);
}

// The same, group of layers by group of layers: ends[g] is the layer behind group g. Each block adds 1 to done[g] when
// all that it copies of the group can be seen from everywhere. A launch of its own for each group would wait every time
// for a kernel that holds all multiprocessors.
extern "C" __global__ void __launch_bounds__(256, 4)
    sgl_kv_load_layers(COPY_PARAMETERS, const int* ends, unsigned int* done, int num_groups) {
    Copy copy = COPY_ARGUMENTS;
    const int num_pages = num_segments / (num_layers * (k_segments + v_segments));
    for (int group = 0; group < num_groups; ++group) {
        copy.num_layers = ends[group] - copy.first_layer;
        copy.num_segments = num_pages * copy.num_layers * (k_segments + v_segments);
        copy_segments(copy);
        copy.first_layer = ends[group];
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
            atomicAdd(done + group, 1u);
        }
    }
}

// The same by Hopper's bulk copies, which need no registers and no lanes that wait for loads. A block is a warp. Each
// lane copies segments by itself, through BULK_SLOTS places of a ring in shared memory: while one is loaded, the
// one before it waits, and an earlier one is stored from. Larger segments are fewer lanes': a copy costs the SM the
// same for any size.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

constexpr unsigned int BULK_RING_BYTES = 128 << 10;
constexpr unsigned int BULK_SLOTS = 4;
// Loads that a lane begins before it stores the first.
constexpr unsigned int BULK_AHEAD = BULK_SLOTS - 2;

__device__ __forceinline__ unsigned int shared_address(const void* p) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ bool is_bulk(const Segment& s) {
    return ((address(s.src) | address(s.dst) | s.size) & 15) == 0;
}

// Other segments are copied without their place. Its barrier changes its phase all the same.
__device__ __forceinline__ void begin_load(const Segment& s, char* slot, unsigned long long* arrived) {
    const unsigned int barrier = shared_address(arrived);
    if (!is_bulk(s)) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
        return;
    }
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(s.size) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(slot)),
        "l"(s.src), "r"(s.size), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void await_load(unsigned long long* arrived, unsigned int phase) {
    unsigned int is_there = 0;
    while (!is_there) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(is_there)
            : "r"(shared_address(arrived)), "r"(phase)
            : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(32) sgl_kv_copy_pages_bulk(COPY_PARAMETERS) {
    const Copy copy = COPY_ARGUMENTS;
    extern __shared__ __align__(128) char ring[];
    __shared__ unsigned long long arrived[32][BULK_SLOTS];
    __shared__ Segment held[32][BULK_SLOTS];
    const unsigned int lane = threadIdx.x;
    const unsigned int fitting = BULK_RING_BYTES / (BULK_SLOTS * copy.segment_bytes);
    const unsigned int lanes = fitting < 32 ? fitting : 32;
    if (lane >= lanes) return;
    char* slots = ring + lane * BULK_SLOTS * copy.segment_bytes;
    for (int i = 0; i < BULK_SLOTS; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived[lane][i])) : "memory");
    }
    // Bulk copies see the barriers only after this.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const unsigned int begin = blockIdx.x * lanes + lane, step = gridDim.x * lanes;
    // Of this lane: segment begin + n * step is the n-th.
    const unsigned int count = begin < copy.num_segments ? (copy.num_segments - begin - 1) / step + 1 : 0;
    if (count == 0) return;
    // Found before it is needed: the page numbers come from memory.
    Segment next = segment_of(copy, begin);
    for (unsigned int n = 0; n < count + BULK_AHEAD; ++n) {
        if (n < count) {
            // The place is free: all stores but the last have been read, and the last is from another.
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            held[lane][n % BULK_SLOTS] = next;
            begin_load(next, slots + n % BULK_SLOTS * copy.segment_bytes, &arrived[lane][n % BULK_SLOTS]);
            if (n + 1 < count) next = segment_of(copy, begin + (n + 1) * step);
        }
        if (n < BULK_AHEAD) continue;
        const unsigned int done = n - BULK_AHEAD;
        const Segment s = held[lane][done % BULK_SLOTS];
        await_load(&arrived[lane][done % BULK_SLOTS], done / BULK_SLOTS & 1);
        if (is_bulk(s)) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(s.dst),
                         "r"(shared_address(slots + done % BULK_SLOTS * copy.segment_bytes)), "r"(s.size)
                         : "memory");
        } else {
            for (int at = 0; at < s.size; ++at) store_byte(s.dst + at, load_byte(s.src + at));
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif
