/* The interface to Python: library.py mirrors the structures, field by field. */
#ifndef SHOAL_H
#define SHOAL_H

#include <stdint.h>

/* Floats, our own int8 and int4, and GGML's types with their numbers unchanged. KIND_UPPER: the upper 5 bits of Q8_0, whose products
   are upper bounds of the exact ones, in eighths (likeliest.h); KIND_ROUGH: the same for floats rounded to 8 bits. From KIND_Q4_K on
   kinds have super-blocks. KIND_IQ2 and KIND_IQ1 hold all types of that name. */
enum {
    KIND_FP32, KIND_BF16, KIND_FP16, KIND_INT8, KIND_INT4, KIND_Q8_0, KIND_Q4_0, KIND_Q4_1, KIND_Q5_0, KIND_Q5_1, KIND_UPPER, KIND_ROUGH,
    KIND_IQ4_NL, KIND_MXFP4, KIND_Q4_K, KIND_Q5_K, KIND_Q6_K, KIND_Q2_K, KIND_Q3_K, KIND_IQ2, KIND_IQ1, KIND_IQ4_XS, KIND_IQ3_S, KIND_IQ3_XXS
};
enum { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };
enum { ACTIVATION_SILU, ACTIVATION_GELU_TANH, ACTIVATION_RELU2, ACTIVATION_GELU, ACTIVATION_RELU, ACTIVATION_XIELU };
enum { RUN_ATTENTION = 1, RUN_MLP = 2, RUN_STORE = 4 }; /* RUN_STORE: of attention keys and values alone */

#define LANES 16      /* output rows of a row block: the fp32 lanes of a vector register */
#define MAX_TOKENS 256 /* most tokens of a forward */
#define MAX_NODES 64   /* most nodes of a tree: a token's ancestors are the bits of one word */
#define MAX_THREADS 64
#define GROUP 32      /* consecutive inputs that share a scale, in most kinds */
#define GROUP_INT8 64
#define ROOM_BESIDE 256 /* spare scores before and after those of a token's slots, together */
#define GROUP_K 256   /* inputs of a super-block: one scale (and minimum) for 8 or 16 small ones */

/* A matrix [rows, cols], packed as layout.h says. Depth is cols rounded up to whole groups; the padding is zero.
   A paired matrix holds two halves (gate and up): even row blocks belong to the first, odd ones to the second. */
typedef struct {
    const void *data;
    const void *scales;
    int32_t kind, rows, cols, paired;
    int32_t depth, blocks, tile; /* filled in by shoal_lay_out */
} ShoalWeight;

/* A recurrence beside or instead of attention. Inputs of a token are, in this order, the rows of its projection:
   RECUR_GATED_DELTA: q, k, v, gate, b, f, or with second matrices of gate and f: q, k, v, b, what these read, gate, f;
   RECUR_MAMBA2: gate, x, B, C, dt; RECUR_SHORT_CONV: B, C, x; RECUR_SCAN: x, gate, and after them, which follow from x once it is
   convolved: r, B, C, dt. Its state is the window [width - 1][channels] of the convolution, followed, but for a short convolution alone,
   by a matrix [heads][key_dim][value_dim]; a scan is one head of all channels.
   RECUR_UNIT: the branch, x; its window is followed by a number for each channel, and by 1 once a text has begun.
   RECUR_LIGHTNING, which convolves nothing (width 1, no channels): q, k and v of each head, then the gate. */
enum { RECUR_GATED_DELTA, RECUR_MAMBA2, RECUR_SHORT_CONV, RECUR_SCAN, RECUR_UNIT, RECUR_LIGHTNING };
#define MOST_TAPS 8   /* inputs of a convolution */
#define MOST_KEYS 256 /* dimensions of a key */
typedef struct {
    ShoalWeight into[3], out;  /* the projection, in parts like qkv below, and the matrix after the recurrence */
    ShoalWeight select, widen; /* of a scan: x to r, B and C; r to dt. Of a gated delta rule with a rank: second ones of gate and f */
    const float *into_scale, *into_bias, *out_bias; /* factors of the projection's rows, before the bias; or NULL */
    const float *conv, *conv_bias; /* [width][channels], the last row for a token's own input; [channels], or NULL */
    const float *rate;  /* [heads], in a scan [key_dim][channels], in a unit [channels]: what the step, or the gate r, is multiplied by,
                            without its sign in a gated delta rule; in lightning attention the decays themselves */
    const float *bias;  /* [heads][decays], in a scan [channels], added to f or dt; in a unit [2][channels], of the gates */
    const float *gates; /* of a unit: [2][heads][value_dim][value_dim], those of r and of i, inputs first */
    const float *skip;  /* [heads], in a scan [channels]: share of x in its output; of Mamba-2 and Mamba alone */
    const float *norm;  /* [value_dim], or in Mamba-2 and lightning attention [heads][value_dim], or NULL; in a scan of r, B and C, each by itself */
    int32_t kind, width, channels, heads;
    int32_t groups;     /* of heads that share keys: of q and k, or of B and C */
    int32_t key_dim, value_dim;
    int32_t rank;       /* of a scan: numbers of r; of a gated delta rule: what each of the second matrices reads, or 0 */
    int32_t decays;     /* of a head: 1, or key_dim */
    int32_t sigmoid;    /* whether the gate is a sigmoid, not SiLU */
    int32_t gate_first; /* whether the gate comes before the norm */
    int32_t doubled;    /* whether b is doubled */
    int32_t shows;      /* whether what a scan has read of its state, before the gate, follows its outputs, for other layers to read */
    int32_t by_turns;   /* whether heads that share keys are not neighbours: the first one of each group, then the second */
    float eps;
    float bound;        /* least logarithm of a decay, in the form that has one; 0: the other */
    float least, most;  /* limits of steps */
} ShoalRecurrence;

/* Experts beside or instead of a layer's MLP. The weights of those that a token runs are its scores, which are sigmoids or the softmax
   of its logits; if they are normalised, divided by their sum plus `added`, or by `least` if that is more. They may read and give
   fewer numbers than states have, between two projections. */
#define MAX_EXPERTS 1024
typedef struct {
    ShoalWeight router;       /* [count, or 1 more if the MLP beside them is gated; hidden] */
    const ShoalWeight *parts; /* [count][3]: gate and up as in a layer, and down */
    ShoalWeight narrow, widen; /* the projections: of states, and of the sum of the experts; or no rows */
    const float *bias;        /* [count], added to scores for the choice alone; or NULL */
    const float *router_bias, *gate_up_bias, *down_bias; /* [count], added to logits; [count][2 ffn] and [count][hidden]; or NULL */
    int32_t count, top;       /* experts, and how many of them a token runs */
    int32_t groups, top_groups; /* equal groups of experts, and how many of them a token's experts are of */
    int32_t best;             /* by how many of its best experts a group counts: 1 or 2 */
    int32_t sigmoid, normalised, gated;
    int32_t into; /* whether weights are factors of what experts read, not of what they give */
    float added, least, scale; /* scale: of the weights */
    float jitter; /* of SparseMixer, see Routing in model/layers/experts.py; 0: the usual weights */
    const float *factors; /* [count], of the weights once they are normalised; or NULL */
    const float *router_norm, *inputs_norm, *beside_norm, *out_norm; /* [hidden], of experts that read the states through norms of their
                             own: of what the router and the experts read, and of what the MLP and they give; or NULL */
    float limit, alpha; /* of (up + 1) gate sigmoid(alpha gate), with gate <= limit and |up| <= limit; limit 0: the usual unit */
} ShoalExperts;

/* Latent attention: qkv has queries, or their latent, then a token's stored vector, then a gate per head if there are any. Of each head
   and of the stored vector the rotated dimensions come first. A stored vector is key and value at once. */
typedef struct {
    ShoalWeight widen;        /* from the latent of queries to queries; or no rows */
    const ShoalWeight *parts; /* [heads][2]: from the plain dimensions of a query to the latent, and from the latent to an output */
    const float *query_norm, *norm; /* of the latent of queries, or NULL, and of the latent */
    int32_t rotated, plain, gated;  /* dimensions of a head's query; whether heads have gates */
    float eps;                /* of these norms */
} ShoalLatent;

/* What a layer does with several streams of states, and the residual connection of low rank beside its attention. */
#define MAX_STREAMS 8
#define HALVED 0.70710678118654752f /* factor of a sum of two parts */
typedef struct {
    ShoalWeight left, right; /* of the residual connection */
    const float *right_norm; /* [hidden] */
    const float *router;     /* [streams][hidden], with the weight of the norm before it, over hidden, in it */
    const float *predict, *correct; /* [streams][streams][streams] and [streams][streams], the maps' rows first */
    const float *scale;      /* [hidden], of the corrected stream where the layer's own input reads it; or NULL */
} ShoalAlternation;

typedef struct {
    ShoalWeight qkv[3];     /* one above the other; if their kinds are equal they are one matrix. Absent ones have no rows */
    ShoalWeight gate_up[2]; /* one paired matrix, or gate and up separately, or up alone, unpaired: an MLP without a gate */
    ShoalWeight o, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const float *attention_out_norm, *mlp_out_norm; /* [hidden], norms of what a sublayer adds to the states; or NULL */
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
    const float *cos, *sin; /* [positions][rotary_dim / 2]; NULL in a layer without rotary embedding */
    int32_t window;         /* 0: none */
    int32_t positions;      /* rows of the tables */
    int32_t wide_norms;     /* whether q_norm and k_norm go over all heads together */
    const ShoalRecurrence *recurrence; /* beside attention, or in place of it: then o has no rows. Or NULL */
    const ShoalLatent *latent; /* if attention is latent; or NULL */
    const ShoalExperts *experts; /* beside the MLP, or in place of it: then down has no rows. Or NULL */
    const float *input_bias, *post_bias; /* of these norms, which then are LayerNorms; or NULL */
    const float *pair_norm; /* [head_dim]: the norm of the difference of a pair's outputs, where attention is differential */
    float pair_share;       /* of the second output of a pair in that difference */
    int32_t reads;       /* 1 + the layer whose keys and values, or whose recurrence's memory, this one reads, having none itself; or 0 */
    int32_t memory_unit; /* whether it is a gated memory unit: its matrices are qkv[0] and o, instead of attention's */
    const float *sinks;     /* [heads], further scores of the softmax, which belong to no slot; or NULL */
    const float *q_norm_bias, *k_norm_bias; /* [heads][head_dim]: biases of these norms, which then are LayerNorms of each head, with as
                                               many weights; or NULL */
    int32_t kv_heads, head_dim, rotary_dim; /* of this layer's keys */
    int32_t value_norm;     /* whether values are normalised, without a weight */
    int32_t chunked;        /* whether the window is of chunks: it begins anew at multiples of its size */
    float warm_share, warm_step, warm_first; /* of queries, see warmth(); or a step of 0 */
    int32_t keys_are_values; /* whether values are the projected keys, before their norm and rotation */
    float scale;            /* of the layer's outputs, states and all */
    ShoalWeight input_gate, input_out; /* of the layer's own input, see layer_inputs.h; or no rows */
    const float *input_out_norm;       /* [hidden] */
    const ShoalAlternation *alternation; /* of a model with several streams; or NULL */
    int32_t cuts;  /* whether the gates of its MLP are cut off: */
    float cutoff;  /* how many standard deviations above their mean they must be */
    const float *curve; /* of ACTIVATION_XIELU: shares above and below 0, slope, and eps */
    const float *out_sub_norm, *down_sub_norm; /* of the inputs of o and down; or NULL */
    float mlp_scale; /* further factor of what the feed-forward adds */
    int32_t crosses; /* whether attention to a source follows: that of the layer so many places after this one, see ShoalModel.layers */
    const float *attention_sum_norm, *attention_sum_bias, *mlp_sum_norm, *mlp_sum_bias; /* of LayerNorms of the states, once a sublayer has
                                                                                           added to them; or NULL */
} ShoalLayer;

/* How pages of experts are asked for before they are read, see foresight.h, and what came of it. */
typedef struct {
    int32_t ahead;  /* layers ahead of which experts are asked for: of those that routers choose at most one, which is guessed */
    int32_t room;   /* of `trace` */
    int32_t *trace; /* gets what ran, in order: layer MAX_EXPERTS + expert; or NULL */
    int64_t used;   /* numbers of the trace, more than `room` if they were too many */
    int64_t chosen, guessed, right; /* experts of layers with guesses, those guessed, and those that are both */
    int64_t bytes;  /* that were asked for */
} ShoalForesight;

enum { ADVISE_HUGE, ADVISE_NEEDED, ADVISE_SCATTERED };
void shoal_advise(const void *start, int64_t bytes, int how);

typedef struct {
    int32_t hidden, ffn /* of the widest layer */, heads, vocab, num_layers, activation, kv_dtype;
    int32_t kv_heads, head_dim, rotary_dim; /* the least, and the most, of any layer; of models that choose slots all layers are equal.
                                               Lines of rotary tables are rotary_dim / 2 long */
    int32_t qkv_rows;                       /* of the widest layer */
    int32_t embedding_dtype;
    float eps, attention_scale, residual_scale, embedding_scale, logit_scale;
    float attention_cap, logit_cap; /* soft caps of scores and logits; 0: none */
    float gate_scale;               /* factor of an MLP's gate before its activation */
    float out_scales[3];            /* factors of what attention, a recurrence and an MLP add, beside residual_scale */
    int32_t keeps;                  /* whether a sublayer adds to its normed inputs, times kept, in place of the states */
    float kept[3];                  /* by sublayer like out_scales */
    int32_t differential;           /* whether attention is: of heads 2h and 2h + 1 of queries, half as long as keys are, one reads the first
                                       half of a key, the other the second, and their outputs become one */
    int32_t gate_rows;              /* rows of qkv after those of q, by whose sigmoids attention's outputs are multiplied: each by its own, or
                                       all of a head by one; 0: none */
    int32_t inputs, channels, outputs; /* of the widest recurrence; 0: there is none */
    int32_t raw, wide, opened; /* of latent attention: rows of qkv, of widen, and of all outputs together; 0: values are apart from keys */
    int32_t experts, top, expert_ffn, narrow; /* the most of any layer; 0: there are none, or no projections */
    const ShoalLayer *layers; /* [num_layers], followed, where layers attend to a source, by as many of that attention alone: qkv[0] and o,
                                 their norm and biases; each reads the layer whose number it has without num_layers */
    const float *norm, *norm_bias; /* norm_bias: not NULL for a LayerNorm */
    ShoalWeight head;
    ShoalWeight upper; /* of KIND_UPPER or KIND_ROUGH, for the likeliest tokens; or no rows */
    const float *head_bias;
    const void *embedding; /* [vocab, hidden] row-major, or NULL: rows are read out of `table` */
    ShoalWeight table;     /* [vocab, hidden]; may be the head */
    const float *positions; /* [position_count][hidden], added to embeddings; or NULL */
    const float *embedding_norm, *embedding_norm_bias; /* of the LayerNorm of embeddings, or NULL */
    int32_t position_count;
    int32_t parallel;      /* whether attention and MLP read the same states, those that enter a layer */
    int32_t rotates_first; /* whether queries and keys are rotated before they are normalised */
    int32_t drifts;        /* whether tokens may be rotated by other places than their position, as behind pictures and films */
    const float *slopes;   /* [heads]: what a slot's place less the query's is multiplied by and added to the score (ALiBi); or NULL */
    const float *distance_bias; /* [heads][distances], by how far a slot is before the query, added to the score: the last one for all
                                   that are farther; not of attention to a source. Or NULL */
    int32_t distances, distance_step; /* step: from a layer's table to the next one's, in numbers; 0: all share one */
    float qkv_limit;       /* the largest size of a number of q, k and v; 0: none */
    int32_t layer_input;   /* numbers of a token's input to each layer; 0: there is none */
    int32_t streams, active_stream; /* of states between layers, and the one that layers compute on; 0: there is one */
    int32_t cuts;          /* whether some layer's gates are cut off */
    int32_t apart;         /* whether some layer's experts read the states through norms of their own */
    ShoalWeight input_table, input_project; /* [tokens, num_layers layer_input] and [num_layers layer_input, hidden] */
    const float *input_norm;                /* [layer_input] */
    ShoalWeight spread;        /* [(streams - 1) hidden, hidden], from embeddings to all streams but the first */
    const ShoalWeight *gather; /* [streams - 1] of [hidden, hidden], applied to these at the end */
    ShoalForesight *foresight;              /* where the experts' file does not lie in memory; or NULL */
} ShoalModel;

/* Some slots of a row in memory that other rows may read too, and nobody writes: [kv_heads, count] lines in the type of the cache. */
typedef struct {
    const void *keys, *values;
    int32_t first, count; /* slots first..first+count-1; a row may read fewer of its last piece */
} ShoalPiece;

/* What a row stores in a layer outside the common cache. */
typedef struct {
    void *keys, *values;                 /* [kv_heads, capacity] lines in the form of kv_blocks.h, instead of those of the cache; or NULL */
    uint16_t *key_scales, *value_scales; /* [kv_heads, capacity, blocks] */
    const float *bias;                /* [kv_heads, bias_capacity], added to the scores of the slots; or NULL */
    const uint16_t *key_bits, *value_bits;     /* for the first slots: [kv_heads, settled_capacity, words of 16 dimensions]; or NULL */
    const void *key_numbers, *value_numbers;   /* [kv_heads, settled_capacity, numbers]: those whose bit is set; the others are 0 */
    int32_t capacity, bias_capacity;
    int32_t settled, settled_capacity, numbers; /* settled: number of those slots; the cache has the others at their places */
    int32_t forms[2]; /* of keys and of values: STORED_INT8 or STORED_INT4; values have no more bits than keys */
    int32_t lent, piece_count;
    const ShoalPiece *pieces; /* with the first `lent` slots, in order, in place of those of the cache; or NULL */
} ShoalOwn;

/* What a token does in a layer: it reads all slots that it sees; it also chooses some of them; it reads its last choice; it chooses
   by labels and reads that. */
enum { READS_ALL, CHOOSES, READS_CHOSEN, READS_LABELED };

/* How the kernels choose the slots that a token reads: those with the largest scores, its own included, for each query head or for
   all heads that share a KV head together. In the latter case a slot counts by the largest probability that any of the heads gives
   it, since the size of scores differs from head to head. */
typedef struct {
    const uint8_t *roles; /* [active_count]; READS_CHOSEN becomes CHOOSES if there is no choice that fits */
    float *scores;        /* [heads][room] */
    int32_t *slots;     /* [kv_heads or heads][count], ascending, -1s first: the last choice, as places in the token's own text */
    int32_t count, room;  /* count 0: the token reads all in every layer */
    int32_t stored;       /* committed slots of the layer that chose; -1: nothing was chosen yet */
    int32_t width;        /* numbers of a label, which are some dimensions of a key; 0: no layer has labels */
    const int32_t *dims;  /* [active_count][kv_heads][width] */
    void *const *labels;  /* [active_count] of [kv_heads][label_room / 16][width][16], in the type of stored keys, or bf16 for bytes. bf16 is
                             stored in pairs, [width / 2][16][2], followed by an odd last one [16]. Slot c has place c + (positions no
                             longer stored) % 16; tokens of one row share them */
    const int32_t *known; /* [active_count]: number of slots whose labels are known; the others are filled in */
    int32_t label_room;
    int32_t apart;        /* whether each query head has slots of its own */
} ShoalChoice;

/* Tokens first..first+count-1 of a batch, which follow one another in a text, as recurrences run them. */
typedef struct {
    int32_t first, count;
} ShoalSpan;

/* What an adapter of low rank adds to the outputs of a layer's matrices: B (A x), x being what the matrices read. Matrices one above the
   other, and pairs, are one site; their rows of A are one above the other. */
enum { SITE_QKV, SITE_O, SITE_GATE_UP, SITE_DOWN, SITES };
typedef struct {
    const float *down;    /* [rank] lines of cols, rounded up to whole vectors */
    const float *up;      /* [row blocks of the site][rank][16], with the factor in it */
    const int32_t *spans; /* [row blocks][2]: the first row of A of which a block has something, and the end */
    int32_t rank, cols;   /* rank 0: nothing */
} ShoalLowRank;

typedef struct {
    const ShoalLowRank *parts; /* [num_layers][SITES] */
    int32_t rank;              /* the most of any part */
} ShoalAdapter;

/* Tokens of one row are consecutive, and consecutive nodes of its tree; earlier nodes are already in their slots.
   Rows ascend. */
typedef struct ShoalBatch {
    int32_t tokens, wanted_count, active_count, rows;
    int32_t *ids, *position, *base; /* steps move them on */
    const int32_t *row, *node;
    const uint64_t *ancestors; /* bit j: node j of the same row is visible: itself and its path to node 0. 0: all nodes up to itself, as in
                                  a piece of a prompt, which may have more nodes than a tree */
    const int32_t *wanted;     /* tokens whose logits are asked for */
    int32_t *argmax;           /* [wanted_count]: gets the row of the largest logit of each token, the first of equals, in place of logits;
                                  or NULL */
    int32_t *likeliest;        /* not NULL: argmax is found by bounds of the logits; this counts the row blocks of the head that they let
                                  through */
    const int32_t *layers;     /* [active_count], ascending */
    const uint8_t *active;     /* [active_count][tokens] of RUN_ATTENTION or RUN_STORE, and RUN_MLP; or NULL: all run both sublayers */
    const int32_t *start;      /* [active_count][tokens] positions that are no longer stored, or NULL: none */
    void *const *keys;         /* [num_layers] of [rows, kv_heads, capacity, head_dim] */
    void *const *values;
    const int32_t *capacity;   /* [num_layers], 0 for no storage */
    const ShoalOwn *own;       /* [num_layers][rows], or NULL: no row stores anything outside the cache */
    float *queries;            /* [tokens][heads][head_dim], filled in for `select` */
    void (*select)(int32_t);   /* called for each running layer (with its number in `layers`) once its queries and keys are
                                  there; fills in what follows. NULL: all slots are read */
    const int32_t *const *slots; /* [tokens] of [kv_heads or heads][counts[token]]: the slots that a token reads, ascending, -1 for none */
    const int32_t *counts;         /* [tokens]; 0: all that it sees */
    const uint8_t *apart;          /* [tokens]; whether each of its query heads has slots of its own */
    ShoalChoice *choices;          /* [tokens], or NULL; not together with `select` */
    float *taps;               /* [tap_count][tokens][hidden, or of all streams]: the states that enter some layers, and those after the last; or NULL */
    const int32_t *tapped;     /* [active_count + 1]: where those states go in taps, layer by layer, and those after them; -1: nowhere */
    const float *vectors;      /* [tokens][hidden, or of all streams]: inputs of the first layer in place of embeddings; or NULL */
    const float *beside;       /* [tokens][rows of qkv]: added to queries, keys and values of a model of one layer; or NULL */
    const ShoalWeight *experts; /* [num_layers][expert_count][2]: groups of the MLPs' neurons, each a paired matrix and its down */
    const uint32_t *groups;     /* [active_count][tokens], bit g: the token runs group g; 0: the whole MLP. NULL: all do */
    int32_t expert_count, tap_count;
    int32_t span_count;
    const ShoalSpan *spans;    /* all tokens, in order; only models with recurrences have any */
    float *const *states;      /* [active_count][span_count][2]: a recurrence's state before a span, NULL for the first one of a text,
                                  and where the state after it goes; both NULL in layers without one */
    float *const *inputs;      /* [active_count]: gets the inputs of a recurrence, [tokens] lines of whole vectors; or NULL */
    const ShoalAdapter *const *adapters; /* [tokens], NULL for a token without; or NULL: there are none */
    void (*aside)(void);       /* called once all taps up to a layer are there, by one thread of several, which leaves the others; the
                                  forward ends when both have. NULL: all go on together */
    double *others;            /* with `aside`: gets the seconds that the others went on for; 0 if nobody left */
    int32_t leaves_at;         /* before which running layer it leaves; active_count: before the head */
    const struct ShoalBatch *crossed; /* the same tokens as they attend to their sources, of each of which all slots are in pieces: its
                                         layers are those after the model's own, and every token is node 0 over all slots but the last.
                                         NULL in models without */
} ShoalBatch;

/* Guesses that a model appends to the wanted tokens of a batch, one after the other, by argmax or drawn. Vectors take the place of
   embeddings: of_state times the state before a token, plus the token's share. States before the batch's tokens come from another
   model and are normalised with its norm, those of guesses with this model's, and both once more by their size alone. */
typedef struct {
    ShoalWeight of_state;     /* [hidden, hidden] */
    const float *ones;        /* [hidden] */
    const float *shares;      /* [vocab][hidden] */
    const float *norm;        /* [hidden], the other model's final norm; eps is its epsilon */
    const float *const *states; /* [tokens] of [hidden]: the states before the tokens of the batch */
    const float *const *known;  /* [tokens] of [hidden]: their shares */
    const int32_t *lengths;   /* [wanted_count]: most guesses of each chain */
    const float *colder;      /* [wanted_count]: 1 / temperature, the factor of logits before a draw; 0: argmax */
    const double *uniforms;   /* [wanted_count][length] in [0, 1), for the draws */
    int32_t *guesses, *counts; /* [wanted_count][length]; the number of guesses in each, initially 0 */
    float *logs;              /* [wanted_count][length]: log-likelihood of the path up to each guess */
    int32_t length;
    float eps;
    float least;              /* paths less likely than e^least are not continued */
} ShoalChain;

/* The places of a source, each of which attends to all, see encode.h. */
typedef struct {
    const float *queries;       /* [heads][places][dim] */
    const void *keys, *values;  /* the same, in `dtype` */
    float *out;                 /* [places][heads][dim] */
    const float *bias;          /* [heads][2 places - 1], added to scores by how far the key is after the query, from 1 - places on, and
                                   room for 32 more; or NULL */
    int32_t heads, places, dim, dtype;
    float scale;                /* of scores */
} ShoalSource;

/* Steps that follow the first one of a batch. */
typedef struct {
    const int32_t *ends; /* tokens after which no step follows */
    int32_t end_count;
    int32_t most;        /* most steps, the first among them; argmax has room for the tokens of all: [most][wanted_count] */
    int32_t done;        /* gets the number of steps */
} ShoalSteps;

/* Whether a batch, and chains or steps whose batch has passed, have an index out of range: 0, or 1 with the reason in `message`. */
int shoal_check(const ShoalModel *, const ShoalBatch *, char *message, int size);
int shoal_check_chains(const ShoalModel *, const ShoalBatch *, const ShoalChain *, char *message, int size);
int shoal_check_steps(const ShoalModel *, const ShoalBatch *, const ShoalSteps *, char *message, int size);

#endif
