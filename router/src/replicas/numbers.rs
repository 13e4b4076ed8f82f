//! Requests by the numbers that routers give them, one after the other: as good as hashes by themselves, but for a turn of their bits.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// What is known of requests, by number.
pub(super) type ByNumber<T> = HashMap<u64, T, BuildHasherDefault<Turned>>;

/// Spreads numbers in a row over all bits. Whoever draws them is another router with the same seed, who would harm itself.
#[derive(Clone, Copy, Default)]
pub(super) struct Turned(u64);

/// 2^64 over the golden ratio, odd: what Fibonacci hashing multiplies by.
const TURN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for Turned {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // Tables look at the lowest bits and at the highest.
        self.0 = (self.0 ^ number).wrapping_mul(TURN).rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;

    use super::*;

    #[test]
    fn numbers_in_a_row_differ_in_the_bits_that_tables_look_at() {
        let hash = |number: u64| ByNumber::<()>::default().hasher().hash_one(number);
        let (mut low, mut high) = (std::collections::HashSet::new(), std::collections::HashSet::new());
        for number in 0..128 {
            low.insert(hash(number) % 128);
            high.insert(hash(number) >> 57);
        }
        assert!(low.len() > 64 && high.len() > 64, "{} {}", low.len(), high.len());
    }
}
