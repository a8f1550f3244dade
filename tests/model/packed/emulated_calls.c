/* Runs calls of a library for a process on another kind of processor, see tests/emulated.py. A call comes with the memory
   that it reaches, as one block that begins with its arguments; what became of the block goes back. Compiled with the
   address sanitizer, it lets nobody read or write between the block's pieces. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { ARGUMENTS = 10 };
typedef int64_t Function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t); /* numbers and addresses, a register each */

void __asan_poison_memory_region(const volatile void *, size_t) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void *, size_t) __attribute__((weak));

static struct {
    char name[32];
    int64_t bytes, addresses, gaps;
} call;

static void *taken(int64_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!memory || fread(memory, 1, bytes, stdin) != (size_t)bytes) abort();
    return memory;
}

int main(int count, char **words) {
    void *library = dlopen(words[count - 1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    while (fread(&call, sizeof call, 1, stdin)) {
        char *block = taken(call.bytes);
        int64_t *addresses = taken(8 * call.addresses); /* where the block holds addresses, counted from its start */
        int64_t *gaps = taken(16 * call.gaps); /* from, and up to */
        for (int i = 0; i < call.addresses; i++) *(int64_t *)(block + addresses[i]) += (int64_t)block;
        for (int i = 0; i < 2 * call.gaps && __asan_poison_memory_region; i += 2)
            __asan_poison_memory_region(block + gaps[i], gaps[i + 1] - gaps[i]);
        const int64_t *a = (const int64_t *)block;
        Function *function = (Function *)dlsym(library, call.name);
        const int64_t result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
        if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(block, call.bytes);
        fwrite(&result, 8, 1, stdout);
        fwrite(block, 1, call.bytes, stdout);
        fflush(stdout);
        free(block), free(addresses), free(gaps);
    }
}
