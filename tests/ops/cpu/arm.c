/* Runs programs of the kernels' library on the memory of another process: see on_arm.py, which is on the other side.

usage: arm LIBRARY NAME...     First it says what 8 bytes each name stands for, which is the value of constants. Then, over
and over: it reads regions of memory, a program, and which words of that are addresses; runs it; writes the regions. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static void stop(const char *why) {
    fprintf(stderr, "arm: %s\n", why);
    exit(1);
}

static void take(void *to, int64_t bytes) {
    if (bytes && fread(to, bytes, 1, stdin) != 1) stop("half a message");
}

/* Memory that ends where none may be touched. */
static char *region(int64_t bytes, int64_t *mapped) {
    const int64_t page = 65536, room = (bytes + page - 1) / page * page;
    *mapped = room + page;
    char *memory = mmap(NULL, *mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + room, page, PROT_NONE)) stop("no memory");
    return memory + room - bytes;
}

int main(int count, char **names) {
    void *library = dlopen(names[1], RTLD_NOW);
    if (!library) stop(dlerror());
    for (int i = 2; i < count; i++) fwrite(dlsym(library, names[i]), 8, 1, stdout);
    fflush(stdout);
    void (*run_program)(const uint64_t *, int64_t, int) = dlsym(library, "run_program");
    int64_t head[4]; /* regions, words, addresses among them, threads */
    while (fread(head, sizeof head, 1, stdin) == 1) {
        int64_t bytes[head[0] + 1], mapped[head[0] + 1], addresses[head[2] + 1][2]; /* word; region, or -1: a kernel */
        uint64_t program[head[1] + 1];
        char *regions[head[0] + 1];
        take(bytes, 8 * head[0]);
        take(program, 8 * head[1]);
        take(addresses, 16 * head[2]);
        for (int64_t i = 0; i < head[0]; i++) {
            regions[i] = region(bytes[i], &mapped[i]);
            take(regions[i], bytes[i]);
        }
        for (int64_t i = 0; i < head[2]; i++) { /* words are offsets, or numbers of names */
            uint64_t *word = program + addresses[i][0];
            const int64_t in = addresses[i][1];
            *word = in < 0 ? (uint64_t)dlsym(library, names[2 + *word]) : (uint64_t)regions[in] + *word;
        }
        run_program(program, head[1], head[3]);
        for (int64_t i = 0; i < head[0]; i++) {
            if (bytes[i]) fwrite(regions[i], bytes[i], 1, stdout);
            munmap(regions[i] - (mapped[i] - 65536 - bytes[i]), mapped[i]);
        }
        fflush(stdout);
    }
    return 0;
}
