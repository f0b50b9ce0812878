// CUDA C++ on the CPU, for tests of what a kernel computes. The threads of a block take turns, which change where they
// wait for each other; blocks run one after the other; both in an order that is drawn. PTX statements have become calls
// of ptx_INSTRUCTION, which this file has for the instructions of kvcacheio.cu: another one does not compile.
//
// Asynchronous copies are carried out at a drawn moment between the first and the last that is allowed, so that code
// that uses what it has not waited for is found. How a GPU orders plain accesses to memory is not modelled.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <setjmp.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Of one block at a time.
#define __shared__ static

namespace on_cpu {

struct Dim {
    unsigned int x;
};

// Why a launch is wrong, nullptr if nothing is.
static const char* error;

inline void fail(const char* why) {
    if (!error) error = why;
}

static void (*on_add)(unsigned int*);

static void yield();

// All threads of a group wait for each other.
class Meeting {
  public:
    explicit Meeting(int size) : size_(size) {}

    void arrive() {
        const int round = round_;
        if (++arrived_ == size_) next();
        while (round == round_) yield();
    }

    void leave() {
        if (--size_ > 0 && arrived_ == size_) next();
    }

    int round() const { return round_; }

  private:
    void next() { arrived_ = 0, ++round_; }

    int size_, arrived_ = 0, round_ = 0;
};

struct Warp {
    Meeting meeting{32};
    unsigned long long values[32];
};

// A copy that has begun. Its bytes are moved once.
struct Copy {
    char* dst;
    const char* src;
    unsigned int size;
    bool is_done = false;

    void finish() {
        if (!is_done) std::memcpy(dst, src, size);
        is_done = true;
    }
};

struct Barrier {
    unsigned int parity = 0;
    int arrivals = 0, wanted = 0;
    // Of its loads in this phase.
    long long expected_bytes = 0;
    std::vector<Copy> loads;
};

struct Thread {
    Dim index, of_block;
    Meeting* block;
    Warp* warp;
    std::mt19937 draw;
    // Where it begins and where it goes on: changing between contexts asks the kernel, jumps do not.
    ucontext_t begin;
    jmp_buf next;
    std::vector<char> stack = std::vector<char>(64 << 10);
    bool has_begun = false, has_ended = false;
    std::map<std::uintptr_t, Barrier> barriers;
    // Stores since the last commit, and the groups that were committed.
    std::vector<Copy> stores;
    std::vector<std::vector<Copy>> groups;

    void maybe(Copy& copy) {
        if (draw() & 1) copy.finish();
    }

    void wait_groups(unsigned int most_left) {
        while (groups.size() > most_left) {
            for (Copy& store : groups.front()) store.finish();
            groups.erase(groups.begin());
        }
    }
};

static Thread* self;
static jmp_buf scheduler;
static const std::function<void()>* kernel_of_launch;

static void yield() {
    if (!_setjmp(self->next)) _longjmp(scheduler, 1);
}

static void go_on(Thread* thread) {
    self = thread;
    if (_setjmp(scheduler)) return;
    if (thread->has_begun) _longjmp(thread->next, 1);
    thread->has_begun = true;
    setcontext(&thread->begin);
}

}  // namespace on_cpu

#define threadIdx (on_cpu::self->index)
#define blockIdx (on_cpu::self->of_block)
static on_cpu::Dim blockDim, gridDim;

inline void __syncthreads() { on_cpu::self->block->arrive(); }
inline void __threadfence_system() {}

inline void atomicAdd(unsigned int* word, unsigned int value) {
    *word += value;
    if (on_cpu::on_add) on_cpu::on_add(word);
}

template <class T>
T __shfl_sync(unsigned int, T value, int lane) {
    static_assert(sizeof(T) <= 8);
    on_cpu::Warp& warp = *on_cpu::self->warp;
    std::memcpy(&warp.values[threadIdx.x & 31], &value, sizeof(T));
    warp.meeting.arrive();
    T found;
    std::memcpy(&found, &warp.values[lane], sizeof(T));
    warp.meeting.arrive();
    return found;
}

inline bool __all_sync(unsigned int, bool value) {
    on_cpu::Warp& warp = *on_cpu::self->warp;
    warp.values[threadIdx.x & 31] = value;
    warp.meeting.arrive();
    const bool all = std::all_of(warp.values, warp.values + 32, [](unsigned long long each) { return each != 0; });
    warp.meeting.arrive();
    return all;
}

// -- shared memory ---------------------------------------------------------------------------------------------

alignas(128) extern char ring[];

inline std::uintptr_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

// An address of 32 bits, as PTX has it, lies within 2 GiB of the ring.
inline char* shared(unsigned int address) {
    const auto base = reinterpret_cast<std::uintptr_t>(ring);
    return ring + static_cast<std::int32_t>(address - static_cast<std::uint32_t>(base));
}

// -- PTX: what is written, then what is read ---------------------------------------------------------------------

using Word = unsigned int;

inline void ptx_ld_global_nc_L1_no_allocate_v4_u32(Word& x, Word& y, Word& z, Word& w, const char* p) {
    if (reinterpret_cast<std::uintptr_t>(p) & 15) on_cpu::fail("a load of 16 bytes is not aligned");
    std::memcpy(&x, p, 4), std::memcpy(&y, p + 4, 4), std::memcpy(&z, p + 8, 4), std::memcpy(&w, p + 12, 4);
}
inline void ptx_st_global_cs_v4_u32(char* p, Word x, Word y, Word z, Word w) {
    if (reinterpret_cast<std::uintptr_t>(p) & 15) on_cpu::fail("a store of 16 bytes is not aligned");
    std::memcpy(p, &x, 4), std::memcpy(p + 4, &y, 4), std::memcpy(p + 8, &z, 4), std::memcpy(p + 12, &w, 4);
}
inline void ptx_ld_global_nc_L1_no_allocate_u32(Word& v, const char* p) {
    if (reinterpret_cast<std::uintptr_t>(p) & 3) on_cpu::fail("a load of 4 bytes is not aligned");
    std::memcpy(&v, p, 4);
}
inline void ptx_st_global_cs_u32(char* p, Word v) {
    if (reinterpret_cast<std::uintptr_t>(p) & 3) on_cpu::fail("a store of 4 bytes is not aligned");
    std::memcpy(p, &v, 4);
}
inline void ptx_ld_global_nc_L1_no_allocate_u8(Word& v, const char* p) { v = static_cast<unsigned char>(*p); }
inline void ptx_st_global_cs_u8(char* p, Word v) { *p = static_cast<char>(v); }

inline on_cpu::Barrier& barrier_at(Word address) {
    return on_cpu::self->barriers[reinterpret_cast<std::uintptr_t>(shared(address))];
}
inline void ptx_mbarrier_init_shared_cta_b64(Word barrier) {
    barrier_at(barrier) = {};
    barrier_at(barrier).wanted = 1;
}
inline void ptx_fence_proxy_async_shared_cta() {}
inline void arrive(on_cpu::Barrier& barrier) {
    // Two arrivals in a phase of one would end the next phase, too.
    if (++barrier.arrivals > barrier.wanted) on_cpu::fail("a barrier is used again before its phase was awaited");
}
inline void ptx_mbarrier_arrive_shared_cta_b64(Word barrier) { arrive(barrier_at(barrier)); }
inline void ptx_mbarrier_arrive_expect_tx_shared_cta_b64(Word barrier, int size) {
    arrive(barrier_at(barrier));
    barrier_at(barrier).expected_bytes += size;
}
inline void ptx_cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(
    Word dst, const char* src, int size, Word barrier) {
    if ((reinterpret_cast<std::uintptr_t>(src) | reinterpret_cast<std::uintptr_t>(shared(dst)) | size) & 15)
        on_cpu::fail("a bulk load is not aligned to 16 bytes");
    on_cpu::Barrier& of = barrier_at(barrier);
    of.loads.push_back({shared(dst), src, static_cast<Word>(size)});
    on_cpu::self->maybe(of.loads.back());
}
inline void ptx_mbarrier_try_wait_parity_shared_cta_b64(Word& is_there, Word barrier, Word parity) {
    on_cpu::Barrier& of = barrier_at(barrier);
    is_there = 1;
    // The phase of this parity is over: it was awaited too late, or another one is meant.
    if (of.parity != parity) {
        on_cpu::fail("a barrier is awaited in the wrong phase");
        return;
    }
    if (of.arrivals < of.wanted) on_cpu::fail("a barrier is awaited at which nothing will arrive");
    for (on_cpu::Copy& load : of.loads) {
        load.finish();
        of.expected_bytes -= load.size;
    }
    if (of.expected_bytes != 0) on_cpu::fail("a barrier expects other bytes than are loaded");
    of.loads.clear();
    of.parity ^= 1, of.arrivals = 0, of.expected_bytes = 0;
}
inline void ptx_cp_async_bulk_global_shared_cta_bulk_group(char* dst, Word src, int size) {
    if ((reinterpret_cast<std::uintptr_t>(dst) | reinterpret_cast<std::uintptr_t>(shared(src)) | size) & 15)
        on_cpu::fail("a bulk store is not aligned to 16 bytes");
    on_cpu::self->stores.push_back({dst, shared(src), static_cast<Word>(size)});
    on_cpu::self->maybe(on_cpu::self->stores.back());
}
inline void ptx_cp_async_bulk_commit_group() {
    on_cpu::self->groups.push_back(std::move(on_cpu::self->stores));
    on_cpu::self->stores.clear();
}
inline void ptx_cp_async_bulk_wait_group_read(int most) { on_cpu::self->wait_groups(most); }
inline void ptx_cp_async_bulk_wait_group(int most) { on_cpu::self->wait_groups(most); }

// -- launches ----------------------------------------------------------------------------------------------------

namespace on_cpu {

template <class T>
T argument(unsigned long long bits) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<T>(bits);
    else
        return static_cast<T>(bits);
}

template <class... P, std::size_t... I>
std::function<void()> bound(void (*kernel)(P...), const unsigned long long* arguments, std::index_sequence<I...>) {
    return [=] { kernel(argument<P>(arguments[I])...); };
}

static void run_thread() {
    (*kernel_of_launch)();
    if (!self->stores.empty() || !self->groups.empty()) fail("a thread ended before its stores");
    for (auto& [address, barrier] : self->barriers)
        if (!barrier.loads.empty()) fail("a thread ended before its loads");
    // A block does not wait for threads that have ended; a warp of which all lanes are asked does.
    self->block->leave();
    self->has_ended = true;
    _longjmp(scheduler, 1);
}

static void run_block(unsigned int block, std::mt19937& draw) {
    Meeting meeting(blockDim.x);
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::unique_ptr<Thread>> threads;
    for (unsigned int i = 0; i < blockDim.x; ++i) {
        if (i % 32 == 0) warps.push_back(std::make_unique<Warp>());
        Thread& thread = *threads.emplace_back(std::make_unique<Thread>());
        thread.index = {i}, thread.of_block = {block}, thread.block = &meeting, thread.warp = warps.back().get();
        thread.draw.seed(draw());
        getcontext(&thread.begin);
        thread.begin.uc_stack.ss_sp = thread.stack.data(), thread.begin.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.begin, run_thread, 0);
    }
    std::shuffle(threads.begin(), threads.end(), draw);
    const auto meetings = [&] {
        long long total = meeting.round();
        for (auto& warp : warps) total += warp->meeting.round();
        return total + std::count_if(threads.begin(), threads.end(), [](auto& each) { return each->has_ended; });
    };
    for (long long before = -1; before != meetings() && !error;) {
        before = meetings();
        for (auto& thread : threads) {
            if (!thread->has_ended && !error) go_on(thread.get());
        }
    }
    const bool all_ended = std::all_of(threads.begin(), threads.end(), [](auto& each) { return each->has_ended; });
    if (!all_ended && !error) fail("threads wait for others that do not come");
}

// Returns what is wrong, nullptr if nothing is.
template <class... P>
const char* launch(void (*kernel)(P...), unsigned int grid, unsigned int block, const unsigned long long* arguments,
                   unsigned int seed) {
    const auto call = bound(kernel, arguments, std::index_sequence_for<P...>());
    kernel_of_launch = &call;
    blockDim = {block}, gridDim = {grid}, error = nullptr;
    std::mt19937 draw(seed);
    std::vector<unsigned int> order(grid);
    for (unsigned int i = 0; i < grid; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), draw);
    for (unsigned int each : order) {
        if (!error) run_block(each, draw);
    }
    return error;
}

}  // namespace on_cpu
