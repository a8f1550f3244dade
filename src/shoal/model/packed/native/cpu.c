/* Features of this machine. Compiled for any processor of the family, so that it is safe to call everywhere. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "shoal.h"
#ifdef SHOAL_NEON
#include <sys/auxv.h>
#endif
#ifdef SHOAL_AMX
#include <cpuid.h>
#include <sys/syscall.h>

/* Linux saves the AMX registers only for processes that have asked for it; then every thread may use them. */
enum { REQUEST_STATE = 0x1023, TILE_DATA = 18 };

static int has_tile_units(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
}
#endif

/* The vector set that the other files were compiled for. */
const char *shoal_vectors(void) {
#if defined SHOAL_NEON
    return "neon";
#elif defined SHOAL_AMX
    return "amx";
#elif defined SHOAL_AVX512
    return "avx512";
#else
    return "avx2";
#endif
}

/* The first instruction set that the kernels need and this processor lacks, or NULL. */
const char *shoal_missing_feature(void) {
#if defined SHOAL_NEON
    if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return "asimddp";
#elif defined SHOAL_AVX512 || defined SHOAL_AMX
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f")) return "avx512f";
    if (!__builtin_cpu_supports("avx512bw")) return "avx512bw";
    if (!__builtin_cpu_supports("avx512vl")) return "avx512vl";
    if (!__builtin_cpu_supports("avx512dq")) return "avx512dq";
    if (!__builtin_cpu_supports("avx512vnni")) return "avx512vnni";
    if (!__builtin_cpu_supports("avx512bf16")) return "avx512bf16";
    if (!__builtin_cpu_supports("avx512vbmi2")) return "avx512vbmi2";
#ifdef SHOAL_AMX
    if (!has_tile_units()) return "amx_int8 or amx_bf16";
    if (syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA)) return "leave to use its tile registers";
#endif
#else
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return "avx2";
    if (!__builtin_cpu_supports("fma")) return "fma";
    if (!__builtin_cpu_supports("bmi2")) return "bmi2";
#endif
    return 0;
}

/* Tell the system how memory from `start` on will be used. ADVISE_HUGE: before it is first touched, for huge pages, since streams then
   cross fewer page boundaries. Of mapped files, ADVISE_NEEDED: soon, so that its pages are read meanwhile, all at once and in the
   background; ADVISE_SCATTERED: without neighbours, which are otherwise read along. */
void shoal_advise(const void *start, int64_t bytes, int how) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), outside = how == ADVISE_NEEDED ? page - 1 : 0;
    const uintptr_t first = ((uintptr_t)start + page - 1 - outside) & ~(page - 1), last = ((uintptr_t)start + bytes + outside) & ~(page - 1);
    if (last > first) madvise((void *)first, last - first, how == ADVISE_HUGE ? MADV_HUGEPAGE : how == ADVISE_NEEDED ? MADV_WILLNEED : MADV_RANDOM);
#endif
}
