/* Programs, and the team of threads that runs them.

A program is a run of 8-byte words. Each step is the kernel's address, the size of its arguments in words, and the
arguments. All threads run the same step, each its share, and meet before the next one, unless the size is negative:
the next step then needs nothing from this one but what the same thread did.

The team is not OpenMP's: that one's threads keep a processor busy while they wait, for a whole time slice if another
program needs it, and a step is much shorter. Here who waits gives way after a moment, and sleeps after a while. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "kernels.h"

typedef void Kernel(const void *arguments, int thread, int threads);

enum {
    SPINS = 64,     /* looks before the processor is offered to others: some us; its taker may be one of the team */
    YIELDS = 8000,  /* such offers before a thread without work sleeps: some ms */
    MOST_THREADS = 256,
};

/* Each on a cache line of its own: what some threads write while others look at another one. */
#define APART __attribute__((aligned(64)))

static struct {
    APART atomic_uint round;     /* counts programs: a new number is the sign to start */
    APART atomic_int running;    /* workers that have not finished the program */
    APART atomic_int arrived;    /* threads that wait for the next step */
    APART atomic_uint steps;     /* counts steps: a new number is the sign to go on */
    APART const uint64_t *program, *end;
    int threads;                 /* that take part, the caller among them */
    int workers;                 /* that exist: indices 1, 2, ... */
    int asleep;                  /* workers that must be woken; guarded by `bed` */
    pthread_mutex_t turn;        /* one program at a time */
    pthread_mutex_t bed;
    pthread_cond_t alarm;
} team = {.turn = PTHREAD_MUTEX_INITIALIZER, .bed = PTHREAD_MUTEX_INITIALIZER, .alarm = PTHREAD_COND_INITIALIZER};

INLINE void look_away(int looks) {
    if (looks > SPINS)
        sched_yield();
    else
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#else
        sched_yield();
#endif
}

static void meet(int threads) {
    const unsigned step = atomic_load_explicit(&team.steps, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team.arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&team.arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team.steps, step + 1, memory_order_release);
    } else {
        for (int looks = 0; atomic_load_explicit(&team.steps, memory_order_acquire) == step; looks++) look_away(looks);
    }
}

static void run(const uint64_t *word, const uint64_t *end, int thread, int threads) {
    while (word < end) {
        const int64_t size = (int64_t)word[1];
        ((Kernel *)(uintptr_t)word[0])(word + 2, thread, threads);
        word += 2 + (size < 0 ? -size : size);
        if (threads > 1 && size >= 0 && word < end) meet(threads);
    }
}

static unsigned next_round(unsigned seen) {
    unsigned round;
    for (int looks = 0; looks < SPINS + YIELDS; looks++) {
        round = atomic_load_explicit(&team.round, memory_order_acquire);
        if (round != seen) return round;
        look_away(looks);
    }
    pthread_mutex_lock(&team.bed);
    team.asleep++;
    while ((round = atomic_load(&team.round)) == seen) pthread_cond_wait(&team.alarm, &team.bed);
    team.asleep--;
    pthread_mutex_unlock(&team.bed);
    return round;
}

static void *work(void *argument) {
    const int thread = (int)(intptr_t)argument;
    unsigned round = atomic_load(&team.round);
    /* The caller waits for new workers, too: a round cannot begin and end before this one looks. */
    atomic_fetch_sub(&team.running, 1);
    for (;;) {
        round = next_round(round);
        if (thread < team.threads) run(team.program, team.end, thread, team.threads);
        atomic_fetch_sub_explicit(&team.running, 1, memory_order_release);
    }
    return NULL;
}

static void wait_for_workers(void) {
    for (int looks = 0; atomic_load_explicit(&team.running, memory_order_acquire); looks++) look_away(looks);
}

/* In a forked child nobody else is there. */
static void forget(void) {
    team.workers = team.asleep = 0;
    atomic_store(&team.running, 0);
    atomic_store(&team.arrived, 0);
    pthread_mutex_init(&team.turn, NULL);
    pthread_mutex_init(&team.bed, NULL);
    pthread_cond_init(&team.alarm, NULL);
}

static void hire(int workers) {
    static atomic_int known;
    if (!atomic_exchange(&known, 1)) pthread_atfork(NULL, NULL, forget);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    while (team.workers < workers) {
        pthread_t thread;
        atomic_fetch_add(&team.running, 1);
        if (pthread_create(&thread, &attributes, work, (void *)(intptr_t)(team.workers + 1))) {
            atomic_fetch_sub(&team.running, 1);
            break; /* fewer will do */
        }
        team.workers++;
    }
    pthread_attr_destroy(&attributes);
    wait_for_workers();
}

void run_program(const uint64_t *program, int64_t words, int threads) {
    if (threads <= 1) {
        run(program, program + words, 0, 1);
        return;
    }
    pthread_mutex_lock(&team.turn);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (team.workers < threads - 1) hire(threads - 1);
    if (threads > team.workers + 1) threads = team.workers + 1;
    team.program = program;
    team.end = program + words;
    team.threads = threads;
    atomic_store(&team.running, team.workers);
    pthread_mutex_lock(&team.bed);
    atomic_fetch_add(&team.round, 1);
    if (team.asleep) pthread_cond_broadcast(&team.alarm);
    pthread_mutex_unlock(&team.bed);
    run(program, program + words, 0, threads);
    wait_for_workers();
    pthread_mutex_unlock(&team.turn);
}

/* Asks for large pages, which the processor finds faster and whose beginnings are rarer. What is not aligned stays out. */
void large_pages(char *memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21, first = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    if (first < end) madvise((void *)first, end - first, MADV_HUGEPAGE); /* a wish: without it nothing is lost */
#else
    (void)memory, (void)bytes;
#endif
}

#if defined(__FLT16_MANT_DIG__) || defined(__F16C__)
const int64_t has_f16 = 1;
#else
const int64_t has_f16 = 0;
#endif
