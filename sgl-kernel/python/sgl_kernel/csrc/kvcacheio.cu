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

// Run (kv, layer, page) lies at base_kv + layer * layer_stride_kv + page * page_stride_kv, in bytes. Segments of a page
// and layer: k_segments of K, then v_segments of V; all but the last of a run are segment_bytes long, which is
// 16 for each lane. num_segments, of all pages and layers, is below 2^31.
extern "C" __global__ void __launch_bounds__(256)
    sgl_kv_copy_pages(const char* src_k, const char* src_v, char* dst_k, char* dst_v, const long long* src_pages,
                      const long long* dst_pages, long long src_layer_stride_k, long long src_page_stride_k,
                      long long src_layer_stride_v, long long src_page_stride_v, long long dst_layer_stride_k,
                      long long dst_page_stride_k, long long dst_layer_stride_v, long long dst_page_stride_v,
                      long long k_bytes, long long v_bytes, int num_layers, int k_segments, int v_segments,
                      int segment_bytes, int num_segments) {
    constexpr unsigned int ALL_LANES = 0xffffffff;
    const int lane = threadIdx.x & 31;
    const unsigned int warp = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const unsigned int step = gridDim.x * (blockDim.x >> 5) * SEGMENTS_AT_ONCE;
    const unsigned int per_layer = k_segments + v_segments;
    const unsigned int per_page = per_layer * num_layers;
    // Neighbouring warps take neighbouring segments: on the page-first side they make one sequential stream.
    for (unsigned int first = warp * SEGMENTS_AT_ONCE; first < num_segments; first += step) {
        // Of segment first + lane; of no bytes where there is none.
        const char* src = src_k;
        char* dst = dst_k;
        int size = 0;
        const unsigned int item = first + lane;
        if (lane < SEGMENTS_AT_ONCE && item < num_segments) {
            const unsigned int index = item / per_page;
            const unsigned int in_page = item - index * per_page;
            const unsigned int layer = in_page / per_layer;
            const unsigned int in_layer = in_page - layer * per_layer;
            const bool is_v = in_layer >= k_segments;
            const long long start = static_cast<long long>(is_v ? in_layer - k_segments : in_layer) * segment_bytes;
            const long long left = (is_v ? v_bytes : k_bytes) - start;
            const long long src_page = src_pages[index], dst_page = dst_pages[index];
            src = start + (is_v ? src_v + layer * src_layer_stride_v + src_page * src_page_stride_v
                                : src_k + layer * src_layer_stride_k + src_page * src_page_stride_k);
            dst = start + (is_v ? dst_v + layer * dst_layer_stride_v + dst_page * dst_page_stride_v
                                : dst_k + layer * dst_layer_stride_k + dst_page * dst_page_stride_k);
            size = left < segment_bytes ? static_cast<int>(left) : segment_bytes;
        }
        const unsigned long long from = reinterpret_cast<unsigned long long>(src);
        const unsigned long long to = reinterpret_cast<unsigned long long>(dst);
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
