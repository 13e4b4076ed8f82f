//! Prompts: a shared beginning and an own end, in letters, so that trees of text take them too.

/// Shared beginnings, as in `bench overhead`.
pub const SHARED: u64 = 8;
/// Workers that hold each of them.
pub const WORKERS: u64 = 16;

/// `length` letters that follow from `seed`.
pub fn text(seed: u64, length: usize) -> String {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut text = String::with_capacity(length + 8);
    while text.len() < length {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        text.extend(state.to_le_bytes().map(|byte| char::from(b'a' + byte % 26)));
    }
    text.truncate(length);
    text
}

/// Prompt number `number` of `kilobytes`: three quarters are one of the shared beginnings.
pub fn shared(kilobytes: usize, number: u64) -> String {
    let bytes = kilobytes * 1_024;
    text(number % SHARED, bytes * 3 / 4) + &text(1_000 + number, bytes / 4)
}

/// Who gets it: each beginning goes to every worker in turn.
pub fn worker(number: u64) -> u32 {
    (number / SHARED % WORKERS) as u32
}
