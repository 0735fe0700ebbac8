/* Counts the bytes that malloc and its kin have given out, now and at most, in a process that is started with this
 * library before glibc's (LD_PRELOAD). For measurements: Linux counts a process's pages in bundles, which is too coarse
 * for steps of a few hundred kilobytes.
 */

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

/* glibc's own, under names that are not replaced. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long now, most;

static void *given(void *block) {
    const long size = (long)malloc_usable_size(block), total = atomic_fetch_add(&now, size) + size;
    long before = atomic_load(&most);
    while (total > before && !atomic_compare_exchange_weak(&most, &before, total)) {
    }
    return block;
}

void *malloc(size_t size) { return given(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return given(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return given(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *found = memalign(alignment, size);
    if (!found) return ENOMEM;
    *block = found;
    return 0;
}

void *realloc(void *block, size_t size) {
    const long before = (long)malloc_usable_size(block);
    void *found = __libc_realloc(block, size);
    if (found || !size) atomic_fetch_sub(&now, before);
    return given(found);
}

void free(void *block) {
    atomic_fetch_sub(&now, (long)malloc_usable_size(block));
    __libc_free(block);
}

long ghostclip_allocated(void) { return atomic_load(&now); }

/* The most since the last call, or since the process began. */
long ghostclip_most_allocated(void) { return atomic_exchange(&most, atomic_load(&now)); }
