// Copies of KV pages between pools, for the few large blocks of GPU-assisted I/O (Strata 4.2).
//
// One warp copies one segment of a run (K or V of one page and one layer) at a time, so a warp works out one pair of
// addresses per segment, and blocks differ by at most one segment. Each lane has four 16-byte loads in flight: two
// blocks of 32 warps keep 128 KiB on the way, which covers the latency of a PCIe 5 link. Loads and stores stay out of
// the caches that the model's kernels use: L1 is not allocated, stored lines are the first to be evicted from L2.
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
__device__ __forceinline__ void copy_segment(const char* src, char* dst, long long size, int lane) {
    const unsigned long long both = reinterpret_cast<unsigned long long>(src) | reinterpret_cast<unsigned long long>(dst);
    long long done = 0;
    if ((both & 15) == 0) {
        constexpr int UNROLL = 4;
        constexpr long long STEP = UNROLL * 32 * 16;
        for (; done + STEP <= size; done += STEP) {
            Vec v[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) v[i] = load_vec(src + done + (i * 32 + lane) * 16);
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) store_vec(dst + done + (i * 32 + lane) * 16, v[i]);
        }
        for (long long at = done + lane * 16; at + 16 <= size; at += 32 * 16) store_vec(dst + at, load_vec(src + at));
        done = size & ~15LL;
    } else if ((both & 3) == 0) {
        for (long long at = lane * 4; at + 4 <= size; at += 32 * 4) store_word(dst + at, load_word(src + at));
        done = size & ~3LL;
    }
    for (long long at = done + lane; at < size; at += 32) store_byte(dst + at, load_byte(src + at));
}

// Run (kv, layer, page) lies at base_kv + layer * layer_stride_kv + page * page_stride_kv, in bytes. Segments of a page
// and layer: k_segments of K, then v_segments of V; all but the last of a run are segment_bytes long. num_segments, of
// all pages and layers, is below 2^31.
extern "C" __global__ void __launch_bounds__(1024)
    sgl_kv_copy_pages(const char* src_k, const char* src_v, char* dst_k, char* dst_v, const long long* src_pages,
                      const long long* dst_pages, long long src_layer_stride_k, long long src_page_stride_k,
                      long long src_layer_stride_v, long long src_page_stride_v, long long dst_layer_stride_k,
                      long long dst_page_stride_k, long long dst_layer_stride_v, long long dst_page_stride_v,
                      long long k_bytes, long long v_bytes, int num_layers, int k_segments, int v_segments,
                      int segment_bytes, int num_segments) {
    const int lane = threadIdx.x & 31;
    const unsigned int num_warps = gridDim.x * (blockDim.x >> 5);
    const unsigned int per_layer = k_segments + v_segments;
    const unsigned int per_page = per_layer * num_layers;
    // Neighbouring warps take neighbouring segments: on the page-first side they make one sequential stream.
    for (unsigned int item = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); item < num_segments;
         item += num_warps) {
        const unsigned int index = item / per_page;
        const unsigned int in_page = item - index * per_page;
        const unsigned int layer = in_page / per_layer;
        const unsigned int in_layer = in_page - layer * per_layer;
        const bool is_v = in_layer >= k_segments;
        const long long start = static_cast<long long>(is_v ? in_layer - k_segments : in_layer) * segment_bytes;
        const long long left = (is_v ? v_bytes : k_bytes) - start;
        const long long src_page = src_pages[index], dst_page = dst_pages[index];
        const char* src = is_v ? src_v + layer * src_layer_stride_v + src_page * src_page_stride_v
                               : src_k + layer * src_layer_stride_k + src_page * src_page_stride_k;
        char* dst = is_v ? dst_v + layer * dst_layer_stride_v + dst_page * dst_page_stride_v
                         : dst_k + layer * dst_layer_stride_k + dst_page * dst_page_stride_k;
        copy_segment(src + start, dst + start, left < segment_bytes ? left : segment_bytes, lane);
    }
}
