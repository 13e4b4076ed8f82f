// What a request's parameters change about logits before a token is drawn: bias, penalties, tokens withheld.
//
// Algorithm: the host names each token that changes once for each row, with all that happens to it; a thread changes one. Bias first,
// then the repetition penalty (Keskar et al. 2019, "CTRL"), then OpenAI's frequency and presence penalties, then -inf where the token
// is withheld; the order, and the numbers that stay finite, are those of worker/src/backend/adjust.rs.
//
// Shapes: logits [rows, vocab] f32. Grid: a thread for each change, 128 to a block. Bytes: 28 a change. FLOPs: at most 7 a change;
// bound by the latency of one launch.
#include "dev.cuh"

struct LogitChange {
    u32 row, token;
    float bias;
    i32 seen; // UNSEEN, or how often it is in the answer: 0 says that it is in the prompt only
    u32 withheld;
};
static constexpr i32 UNSEEN = -1;

struct Penalties { float repetition, frequency, presence; };

struct AdjustParams {
    float* logits;
    const LogitChange* changes;
    const Penalties* penalties; // [rows]
    u32 count, vocab;
};

// What is no number stays none, so that it is not drawn.
DEVICE float finite(float number) {
    const float most = bits_to_float(0x7f7fffffu);
    return number == -infinity() || number != number ? number : maximum(-maximum(-number, -most), -most);
}

KERNEL(adjust_logits, AdjustParams, 128, 8, 0) {
    const u64 index = (u64)block_index() * block_threads() + thread_index();
    if (index >= p.count) return;
    const LogitChange change = p.changes[index];
    const Penalties penalties = p.penalties[change.row];
    float* logit = p.logits + (u64)change.row * p.vocab + change.token;
    float x = finite(*logit + change.bias);
    if (change.seen != UNSEEN) {
        x = x > 0.f ? divide(x, penalties.repetition) : x * penalties.repetition;
        x -= penalties.frequency * (float)change.seen + (change.seen > 0 ? penalties.presence : 0.f);
        x = finite(x);
    }
    *logit = change.withheld ? -infinity() : x;
}
