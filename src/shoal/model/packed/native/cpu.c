/* What this machine can do. Compiled for any processor of the family, so that asking is safe everywhere. */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef SHOAL_NEON
#include <sys/auxv.h>
#endif

/* The first instruction set that the kernels need and this processor lacks, or NULL. */
const char *shoal_missing_feature(void) {
#if defined SHOAL_NEON
    if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return "asimddp";
#elif defined SHOAL_AVX512
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f")) return "avx512f";
    if (!__builtin_cpu_supports("avx512bw")) return "avx512bw";
    if (!__builtin_cpu_supports("avx512vl")) return "avx512vl";
    if (!__builtin_cpu_supports("avx512dq")) return "avx512dq";
    if (!__builtin_cpu_supports("avx512vnni")) return "avx512vnni";
    if (!__builtin_cpu_supports("avx512bf16")) return "avx512bf16";
#else
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return "avx2";
    if (!__builtin_cpu_supports("fma")) return "fma";
    if (!__builtin_cpu_supports("bmi2")) return "bmi2";
#endif
    return 0;
}

/* Ask for huge pages in the memory from `start` on, before it is first touched: streams then cross fewer page ends. */
void shoal_advise(void *start, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)start + page - 1) & ~(page - 1), last = ((uintptr_t)start + bytes) & ~(page - 1);
    if (last > first) madvise((void *)first, last - first, MADV_HUGEPAGE);
#endif
}
