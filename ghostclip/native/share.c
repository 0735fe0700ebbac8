/* A batch's examples shared among the threads of the OpenMP runtime that torch has loaded. Between torch's operations
 * those threads stay awake for a while: they begin at once, where new ones would have to take the processors from them.
 *
 * No runtime is linked: two in a process would each have threads of its own. GOMP_parallel(run, given, threads, flags),
 * which GNU's, LLVM's and Intel's all have, is found in the loaded one and comes as a pointer.
 */

#include <stdatomic.h>

#include "words.h"

/* A function takes no notice of more words than it has. */
#define MOST 22
typedef int (*Function)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                        Word, Word, Word, Word, Word, Word);
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    Function function;
    const Word *words, *edges;
    long count, shares;
    atomic_long next;
    atomic_int failed;
} Job;

static int call(const Job *job, Word first, Word last) {
    Word w[MOST] = {0};
    for (long i = 0; i < job->count; i++) w[i] = job->words[i];
    w[job->count] = first;
    w[job->count + 1] = last;
    return job->function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14],
                         w[15], w[16], w[17], w[18], w[19], w[20], w[21]);
}

/* What each thread runs; how many there are doesn't matter. */
static void work(void *given) {
    Job *job = given;
    for (long mine; (mine = atomic_fetch_add(&job->next, 1)) < job->shares;)
        if (call(job, job->edges[mine], job->edges[mine + 1])) atomic_store(&job->failed, 1);
}

/* Calls function(words[0], ..., words[count - 1], edges[i], edges[i + 1]) for each of the shares, count at most MOST - 2;
 * not 0 where one of them returned so. */
int ghostclip_share(Parallel parallel, Function function, const Word *words, long count, const Word *edges, long shares,
                    unsigned threads) {
    Job job = {function, words, edges, count, shares, 0, 0};
    if (count > MOST - 2) return 1;
    parallel(work, &job, threads, 0);
    return atomic_load(&job.failed);
}
