//! How GGUF stores a tensor's numbers, and how quantised ones become numbers again.
//!
//! A block is a run of a row's numbers that share scales. All but the K formats have blocks of 32 numbers; theirs are of 256, in
//! groups with scales of their own. Derived from ggml's `ggml-common.h`.

use half::f16;
use worker_kernels::Dtype;

/// Formats that can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    /// Numbers as a device takes them.
    Plain(Dtype),
    /// Blocks.
    Quantised(Quantisation),
}

/// Formats of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Quantisation {
    /// Four bits around zero, one scale.
    Q4_0,
    /// Four bits, a scale and a minimum.
    Q4_1,
    /// Eight bits with a sign, one scale.
    Q8_0,
    /// Four bits; scale and minimum of each 32 numbers in six bits.
    Q4K,
    /// Six bits around zero; scale of each 16 numbers in eight bits.
    Q6K,
}

/// What messages say can be read.
pub(super) const SUPPORTED: &str = "F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K";

/// The name of a format that cannot be read.
pub(super) fn kind_name(kind: u32) -> String {
    const NAMES: [(u32, &str); 9] = [
        (6, "Q5_0"),
        (7, "Q5_1"),
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (13, "Q5_K"),
        (15, "Q8_K"),
        (20, "IQ4_NL"),
        (39, "MXFP4"),
    ];
    let name = NAMES.iter().find(|(number, _)| *number == kind);
    name.map_or_else(|| format!("type {kind}"), |(_, name)| (*name).to_owned())
}

impl Format {
    pub(super) fn from_kind(kind: u32) -> Option<Self> {
        Some(match kind {
            0 => Self::Plain(Dtype::F32),
            1 => Self::Plain(Dtype::F16),
            30 => Self::Plain(Dtype::Bf16),
            2 => Self::Quantised(Quantisation::Q4_0),
            3 => Self::Quantised(Quantisation::Q4_1),
            8 => Self::Quantised(Quantisation::Q8_0),
            12 => Self::Quantised(Quantisation::Q4K),
            14 => Self::Quantised(Quantisation::Q6K),
            _ => return None,
        })
    }

    /// Bytes of a row of `columns` numbers.
    pub(super) fn row_bytes(self, columns: usize) -> Result<usize, String> {
        let too_large = || format!("has {columns} columns, more than there is memory for");
        let (numbers, bytes) = match self {
            Self::Plain(dtype) => (1, dtype.bytes()),
            Self::Quantised(quantisation) => quantisation.block(),
        };
        if !columns.is_multiple_of(numbers) {
            return Err(format!("has {columns} columns, which blocks of {numbers} do not divide"));
        }
        (columns / numbers).checked_mul(bytes).ok_or_else(too_large)
    }

    /// Bytes of a tensor; the first of its dimensions, of which there is one at least, is a row.
    pub(super) fn bytes(self, dimensions: &[usize]) -> Result<usize, String> {
        let row = self.row_bytes(dimensions[0])?;
        let all = dimensions[1..].iter().try_fold(row, |bytes, length| bytes.checked_mul(*length));
        all.ok_or_else(|| format!("has the shape {dimensions:?}, more than there is memory for"))
    }
}

impl Quantisation {
    /// Numbers and bytes of a block.
    pub(super) fn block(self) -> (usize, usize) {
        match self {
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q6K => (256, 210),
        }
    }

    /// The numbers of one row, which is whole blocks; `row` is as long as they are.
    pub(super) fn widen(self, blocks: &[u8], row: &mut [f32]) {
        let (numbers, bytes) = self.block();
        let one = match self {
            Self::Q4_0 => q4_0,
            Self::Q4_1 => q4_1,
            Self::Q8_0 => q8_0,
            Self::Q4K => q4_k,
            Self::Q6K => q6_k,
        };
        for (block, out) in blocks.chunks_exact(bytes).zip(row.chunks_exact_mut(numbers)) {
            one(block, out);
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    nibbles(&block[2..], out, |nibble| scale * (f32::from(nibble) - 8.0));
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    nibbles(&block[4..], out, |nibble| scale * f32::from(nibble) + minimum);
}

/// The low halves of the bytes are the first half of the numbers.
fn nibbles(bytes: &[u8], out: &mut [f32], number: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = number(byte & 15);
        *high = number(byte >> 4);
    }
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (byte, out) in block[2..].iter().zip(out) {
        *out = scale * f32::from(byte.cast_signed());
    }
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let (packed, quants) = (&block[4..16], &block[16..]);
    // 32 bytes hold two groups of 32 numbers, in their low and high halves.
    for (pair, (bytes, out)) in quants.chunks_exact(32).zip(out.chunks_exact_mut(64)).enumerate() {
        let [low, high] = [2 * pair, 2 * pair + 1].map(|group| {
            let (factor, offset) = six_bits(packed, group);
            (scale * factor, minimum * offset)
        });
        let (first, second) = out.split_at_mut(32);
        for ((byte, first), second) in bytes.iter().zip(first).zip(second) {
            *first = low.0 * f32::from(byte & 15) - low.1;
            *second = high.0 * f32::from(byte >> 4) - high.1;
        }
    }
}

/// Scale and minimum of a group: those of the first four groups are the low six bits of bytes 0–3 and 4–7; those of the others
/// have their low four bits in bytes 8–11, and their upper two where the first four left room.
fn six_bits(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        ((low & 15) | (packed[group - 4] >> 6 << 4), (low >> 4) | (packed[group] >> 6 << 4))
    };
    (f32::from(scale), f32::from(minimum))
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half_at(block, 208);
    // Each half of the block: 64 bytes of low nibbles, 32 bytes with four pairs of upper bits, 8 scales.
    for (half, out) in out.chunks_exact_mut(128).enumerate() {
        let (low, high, scales) = (&low[half * 64..], &high[half * 32..], &scales[half * 8..]);
        for (group, out) in out.chunks_exact_mut(32).enumerate() {
            for (at, out) in out.iter_mut().enumerate() {
                let nibble = low[group % 2 * 32 + at] >> (group / 2 * 4) & 15;
                let upper = high[at] >> (group * 2) & 3;
                let quant = f32::from(nibble | upper << 4) - 32.0;
                *out = scale * f32::from(scales[group * 2 + at / 16].cast_signed()) * quant;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A number written anywhere as two bytes.
    fn half(bytes: &[u8], at: usize) -> f32 {
        f16::from_bits(u16::from(bytes[at]) | u16::from(bytes[at + 1]) << 8).to_f32()
    }

    /// Bits `from..from + count` of a run of bytes, the lowest of the first byte first.
    fn bits(bytes: &[u8], from: usize, count: usize) -> u32 {
        (0..count).map(|bit| u32::from(bytes[(from + bit) / 8] >> ((from + bit) % 8) & 1) << bit).sum()
    }

    /// Number `i` of a block, each by itself: where its bits lie, and what they mean.
    fn number(quantisation: Quantisation, block: &[u8], i: usize) -> f32 {
        let nibble = |start: usize, byte: usize, upper: bool| {
            bits(block, (start + byte) * 8 + 4 * usize::from(upper), 4) as f32
        };
        match quantisation {
            Quantisation::Q4_0 => half(block, 0) * (nibble(2, i % 16, i >= 16) - 8.0),
            Quantisation::Q4_1 => half(block, 0) * nibble(4, i % 16, i >= 16) + half(block, 2),
            Quantisation::Q8_0 => half(block, 0) * f32::from(block[2 + i] as i8),
            Quantisation::Q4K => {
                let group = i / 32;
                // Six-bit numbers: their low bits, and the place of the upper two.
                let six = |low: usize, upper: Option<usize>| match upper {
                    None => bits(block, low, 6) as f32,
                    Some(upper) => (bits(block, low, 4) + 16 * bits(block, upper, 2)) as f32,
                };
                let byte = |at: usize| (4 + at) * 8;
                let (scale, minimum) = match group {
                    0..4 => (six(byte(group), None), six(byte(4 + group), None)),
                    _ => (
                        six(byte(4 + group), Some(byte(group - 4) + 6)),
                        six(byte(4 + group) + 4, Some(byte(group) + 6)),
                    ),
                };
                let quant = nibble(16, group / 2 * 32 + i % 32, group % 2 == 1);
                half(block, 0) * scale * quant - half(block, 2) * minimum
            }
            Quantisation::Q6K => {
                let (side, group, at) = (i / 128, i % 128 / 32, i % 32);
                let low = nibble(0, side * 64 + group % 2 * 32 + at, group >= 2);
                let upper = bits(block, (128 + side * 32 + at) * 8 + 2 * group, 2) as f32;
                let scale = f32::from(block[192 + i / 16] as i8);
                half(block, 208) * scale * (low + 16.0 * upper - 32.0)
            }
        }
    }

    const ALL: [Quantisation; 5] =
        [Quantisation::Q4_0, Quantisation::Q4_1, Quantisation::Q8_0, Quantisation::Q4K, Quantisation::Q6K];

    proptest! {
        #[test]
        fn blocks_agree_with_each_number_by_itself(mut bytes in prop::collection::vec(any::<u8>(), 2 * 210)) {
            // Scales that are numbers: their exponents' upper bits are cleared.
            for at in 0..bytes.len() / 2 {
                bytes[2 * at + 1] &= 0xbf;
            }
            for quantisation in ALL {
                let (numbers, length) = quantisation.block();
                let mut row = vec![0.0; 2 * numbers];
                quantisation.widen(&bytes[..2 * length], &mut row);
                for (i, found) in row.into_iter().enumerate() {
                    let block = &bytes[i / numbers * length..][..length];
                    prop_assert_eq!(found, number(quantisation, block, i % numbers), "{:?} {}", quantisation, i);
                }
            }
        }
    }

    #[test]
    fn a_block_written_by_hand_reads_as_what_it_says() {
        let one = f16::ONE.to_le_bytes();
        let two = f16::from_f32(2.0).to_le_bytes();
        let mut row = [0.0; 32];
        Quantisation::Q4_0.widen(&[&two[..], &[0x90; 16]].concat(), &mut row);
        assert_eq!((row[0], row[15], row[16], row[31]), (-16.0, -16.0, 2.0, 2.0));
        Quantisation::Q4_1.widen(&[&two[..], &one, &[0x30; 16]].concat(), &mut row);
        assert_eq!((row[0], row[31]), (1.0, 7.0));
        Quantisation::Q8_0.widen(&[&two[..], &[0xff; 32]].concat(), &mut row);
        assert_eq!(row, [-2.0; 32]);
    }

    #[test]
    fn lengths_that_make_no_sense_are_refused() {
        let quantised = Format::Quantised(Quantisation::Q4K);
        assert_eq!(quantised.bytes(&[512, 3]), Ok(2 * 3 * 144));
        assert!(quantised.bytes(&[511, 3]).unwrap_err().contains("511"));
        assert!(Format::Plain(Dtype::F32).bytes(&[usize::MAX, 2]).is_err());
        assert!(Format::Plain(Dtype::F32).bytes(&[1 << 40, 1 << 40]).is_err());
        assert_eq!(kind_name(13), "Q5_K");
    }
}
