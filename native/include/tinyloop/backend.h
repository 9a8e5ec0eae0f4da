/* The seam between the engine's algorithms and a device: a versioned C ABI, so that a backend can be a plug-in library.
 *
 * The unit of work is a set of rows. A row is one token position of one lane's cache, and it says for itself which
 * core iterations it runs: no kernel may assume that all rows are at the same loop or position. Prefill, decode, batch,
 * verification of drafts and resuming from a saved state are all just sets of rows.
 *
 * Order rule: when a row runs loop t at position p, the K/V of every position < p of its cache at loop t must have been
 * written before, or be written by a row of the same call that is at the same step (same loop_begin).
 * Determinism rule (SPEC 2.5): what a row computes must not depend on the other rows of the call, in any bit.
 * Threads: calls on one model must not overlap, except `steps`, which any thread may call at any time.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TL_BACKEND_ABI 3

/* TL_INT8: one scale per output. TL_INT4: one scale per output and 32 inputs. Rows that meet them are quantised too. */
enum tl_dtype { TL_F32 = 0, TL_F16 = 1, TL_BF16 = 2, TL_INT8 = 4, TL_INT4 = 5 };
enum { TL_AS_STORED = -1 };
enum tl_norm { TL_NORM_PRE = 0, TL_NORM_SANDWICH = 1, TL_NORM_POST = 2, TL_NORM_PRE_POST = 3 };
enum tl_injection { TL_INJECT_NONE = 0, TL_INJECT_ADD = 1, TL_INJECT_CONCAT = 2 };
enum tl_start { TL_START_PRELUDE = 0, TL_START_ZEROS = 1 };
enum tl_rope { TL_ROPE_HALF = 0, TL_ROPE_INTERLEAVED = 1 };
/* What a cache keeps of a position: keys and values, or ("h") the layer's normed input, projected again when attended.
 */
enum tl_cache_mode {
    TL_CACHE_FP16 = 0,
    TL_CACHE_INT8 = 1,
    TL_CACHE_H_FP16 = 2,
    TL_CACHE_H_INT8 = 3,
    TL_CACHE_H_INT4 = 4
};
/* After any result the model can be used, and destroyed. TL_FAILED: the device failed while it computed, and what the
   call should have written is undefined; the backend says so again if it cannot go on. */
enum tl_result { TL_OK = 0, TL_NO_MEMORY = 1, TL_UNAVAILABLE = 2, TL_FAILED = 3 };

typedef struct tl_status {
    char message[256]; /* zero-terminated; set when a call does not return TL_OK */
} tl_status;

/* How a matrix lies in memory.
   TL_ROWS: (rows, cols), row-major.
   TL_PANELS: (panels, cols, 16), 64-byte aligned; 16 rows side by side, the last panel padded with zeros. Where rows
   (wq, wk, wv) or cols (wo) are made of heads, every head is padded with zeros to a multiple of 16, but nothing follows
   the last head's own cols. wk then follows wq in memory, and wv wk: one matrix. */
enum tl_layout { TL_ROWS = 0, TL_PANELS = 1 };

typedef struct tl_tensor {
    const void* data; /* NULL = the model has no such tensor */
    int32_t dtype;    /* tl_dtype */
    int32_t rows;     /* outputs, without padding */
    int32_t cols;     /* inputs, without padding; 1 for vectors */
    int32_t layout;   /* tl_layout; vectors are rows */
} tl_tensor;

typedef struct tl_layer {
    tl_tensor attn_norm, attn_post_norm, ffn_norm, ffn_post_norm; /* (d_model) */
    tl_tensor wq;                                                 /* (n_heads * head_dim, d_model) */
    tl_tensor wk, wv;                                             /* (n_kv_heads * head_dim, d_model) */
    tl_tensor wo;                                                 /* (d_model, n_heads * head_dim) */
    tl_tensor q_bias, k_bias, v_bias;                             /* (heads * head_dim) */
    tl_tensor q_norm, k_norm;                                     /* (head_dim) */
    tl_tensor w_gate, w_up;                                       /* (d_ffn, d_model) */
    tl_tensor w_down;                                             /* (d_model, d_ffn) */
} tl_layer;

typedef struct tl_model_desc {
    int32_t vocab_size, d_model, n_heads, n_kv_heads, head_dim, d_ffn;
    int32_t n_prelude, n_core, n_coda;
    int32_t norm, injection, start, rope; /* the enums above */
    float norm_eps, rope_theta, embed_scale, logit_scale;
    const tl_layer* layers; /* n_prelude + n_core + n_coda, in that order */
    tl_tensor embed;        /* (vocab_size, d_model) */
    tl_tensor head;         /* (vocab_size, d_model); NULL data = tied to embed */
    tl_tensor inject;       /* (d_model, 2 * d_model): [x, e] */
    tl_tensor loop_norm, core_norm, final_norm;
    tl_tensor exit_gate, exit_gate_bias; /* (1, d_model), (1); NULL data = none */
} tl_model_desc;

typedef struct tl_options {
    int32_t threads;     /* >= 1 */
    int32_t max_rows;    /* the most rows of one forward call */
    const char* simd;    /* CPU: "auto" or a level's name */
    int32_t device;      /* which of the backend's devices, from 0 */
    int32_t weights;     /* what matrices are held in: a tl_dtype but TL_F32, or TL_AS_STORED, as the tensors are. With
                            TL_INT4 the embedding and the head are TL_INT8. */
    const int32_t* cpus; /* CPU: (threads) processor of each thread but the first, the caller's; NULL = any */
} tl_options;

typedef struct tl_device_info {
    char name[96];        /* "NVIDIA H200" */
    uint64_t total_bytes; /* the device's own memory; 0: it computes in the host's */
} tl_device_info;

typedef struct tl_cache_desc {
    int32_t mode;      /* tl_cache_mode */
    int32_t positions; /* capacity without a window */
    int32_t loops;     /* core iterations it can hold */
    int32_t window;    /* 0: rows see all earlier slots; > 0: the last `window` slots, in a ring of window + max_rows */
} tl_cache_desc;

enum tl_row_flags {
    TL_ROW_CODA = 1,      /* run the coda layers after the last loop (writes their K/V) */
    TL_ROW_LOGITS = 2,    /* ... and the head; implies the coda */
    TL_ROW_KEEP_STATE = 4 /* read `state` but leave it as it is */
};

/* A row sees slots 0 .. base-1 of its cache, and slot base + i for every bit i of `tree`. In a plain sequence slot,
 * base and position are equal and `tree` is 1, the row itself; in a draft tree the bits are the row and its ancestors.
 */
typedef struct tl_row {
    int32_t cache;    /* index into the caches of the call */
    int32_t position; /* for the rotary embedding */
    int32_t slot;     /* where its keys and values go */
    int32_t base;
    uint64_t tree;
    int32_t token;      /* used when loop_begin == 0 */
    int32_t loop_begin; /* 0: embed the token and run the prelude first; > 0: go on from `state` */
    int32_t loop_end;   /* core iterations loop_begin .. loop_end-1 are run */
    int32_t state;      /* index into the states of the call, or -1: read when loop_begin > 0, written after loop_end */
    uint32_t flags;     /* tl_row_flags */
    float exit_threshold; /* > 0: stop looping when the exit gate's cumulative probability reaches it, or, in a model
                             without a gate, when |h(t+1) - h(t)| < exit_threshold * |h(t)|; the slots of the loops left
                             out are filled from the last one run */
    int32_t best;         /* with TL_ROW_LOGITS: how many tokens it wants, the first in rank; 0: the logits of all */
} tl_row;

/* A token's place among the others of a row: the larger logit first, equal logits by id. */
typedef struct tl_rank {
    float logit;
    int32_t id;
} tl_rank;

typedef struct tl_model tl_model;
typedef struct tl_cache tl_cache;   /* the K/V of one lane: a slot per prelude layer, coda layer, (loop, core layer) */
typedef struct tl_states tl_states; /* saved hidden states: per index the core state and the prelude's output */

typedef struct tl_backend {
    uint32_t abi, size;
    const char* name;
    int32_t most_best; /* the most that a row may want in `best`; 0: rows always want the logits of all tokens */

    /* How many devices can be used; 0 puts the reason (no driver, too old a one ...) into the status. Both calls need
       no model, take nothing of a device's memory, and return within 0.1 s where there is none. */
    int32_t (*device_count)(tl_status*);
    int (*device_info)(int32_t device, tl_device_info* out, tl_status*);

    /* The data of tensors in TL_PANELS stays as it is until model_destroy, for use in place; that of the others is
       only read during the call. */
    int (*model_create)(const tl_model_desc*, const tl_options*, tl_model** out, tl_status*);
    void (*model_destroy)(tl_model*);
    uint64_t (*model_bytes)(const tl_model*);    /* weights and work space held by the device */
    int64_t (*free_bytes)(const tl_model*);      /* that the model's device has left; -1: it computes in the host's */
    const char* (*model_level)(const tl_model*); /* "avx2", "sm_90", ... */
    uint64_t (*steps)(const tl_model*);          /* grows with every layer visit */

    int (*cache_create)(tl_model*, const tl_cache_desc*, tl_cache** out, tl_status*);
    void (*cache_destroy)(tl_cache*);
    uint64_t (*cache_bytes)(const tl_model*, const tl_cache_desc*); /* exactly what cache_create allocates */

    int (*states_create)(tl_model*, int32_t count, tl_states** out, tl_status*);
    void (*states_destroy)(tl_states*);
    uint64_t (*states_bytes)(const tl_model*, int32_t count);

    /* Copies slots 0 .. slots-1 (a ring: all of it) of the prelude, the coda and the first `loops` iterations between
       caches of one mode and window. */
    int (*cache_copy)(tl_model*, tl_cache* to, const tl_cache* from, int32_t slots, int32_t loops, tl_status*);
    /* Copies one slot over another in every layer and loop. */
    int (*cache_move)(tl_model*, tl_cache*, int32_t to_slot, int32_t from_slot, tl_status*);

    /* Of the rows with TL_ROW_LOGITS, in row order: logits: (those that want all, vocab_size); best: one behind the
       other what each of the others wants, best first. A logit that is NaN or -infinity has no rank; where fewer have
       one than are wanted, {-infinity, -1} follows. n_rows <= max_rows. loops_run: (n_rows), the loop each row stopped
       at, or NULL. */
    int (*forward)(tl_model*, tl_cache* const* caches, int32_t n_caches, tl_states* states, const tl_row* rows,
                   int32_t n_rows, float* logits, tl_rank* best, int32_t* loops_run, tl_status*);
} tl_backend;

/* What a plug-in library, libtinyloop_<device>.so, exports as `tinyloop_backend`. */
typedef const tl_backend* (*tl_backend_entry)(void);

/* The built-in one. */
const tl_backend* tl_cpu_backend(void);

#ifdef __cplusplus
}
#endif
