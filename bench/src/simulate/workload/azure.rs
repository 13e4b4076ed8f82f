//! Azure's traces: arrivals and lengths as recorded, prefixes made up, since the traces have none.
//!
//! Two thirds of the requests begin with one of 200 prompts, popular by Zipf's law, as far as their length goes; the rest is their own.

use std::path::Path;

use anyhow::Context;
use rand::RngExt;

use super::generated::{Generator, Zipf};
use super::{BLOCK_TOKENS, Draft, Workload};

const PROMPTS: usize = 200;
/// The longest made-up prompt in blocks, and the share of requests that begin with one.
const PROMPT_BLOCKS: u32 = 8;
const SHARED: f64 = 2.0 / 3.0;

/// Reads `TIMESTAMP,ContextTokens,GeneratedTokens`.
///
/// # Errors
/// A file that cannot be read, or a line that is not of the format.
pub fn read(path: &Path, seed: u64) -> anyhow::Result<Workload> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read the trace {}", path.display()))?;
    let name = path.file_stem().map_or_else(|| "azure".into(), |stem| stem.to_string_lossy().into_owned());
    let mut generator = Generator::new(&name, seed);
    let prompts: Vec<Vec<u32>> = (0..PROMPTS)
        .map(|_| {
            let blocks = generator.rng.random_range(1..=PROMPT_BLOCKS) as usize;
            generator.fresh(blocks)
        })
        .collect();
    let popularity = Zipf::new(PROMPTS, 1.0);
    let mut first_s = None;
    for (number, line) in (1..).zip(text.lines()).skip(1).filter(|(_, line)| !line.trim().is_empty()) {
        let (at_s, input_tokens, output_tokens) = parse(line).with_context(|| {
            format!("{} line {number}: expected TIMESTAMP,ContextTokens,GeneratedTokens", path.display())
        })?;
        let at_s = at_s - *first_s.get_or_insert(at_s);
        let blocks = (input_tokens as usize).div_ceil(BLOCK_TOKENS);
        let mut ids = Vec::new();
        if generator.rng.random_bool(SHARED) {
            let prompt = &prompts[popularity.draw(&mut generator.rng)];
            ids.extend(prompt.iter().take(input_tokens as usize / BLOCK_TOKENS));
        }
        ids.extend(generator.fresh(blocks - ids.len()));
        generator.workload.push(Draft { at_s, input_tokens, output_tokens, ..Draft::default() }, ids);
    }
    let mut workload = generator.workload;
    anyhow::ensure!(!workload.requests.is_empty(), "{} has no requests", path.display());
    workload.sort();
    Ok(workload)
}

/// Seconds (of the day, counted on from day to day of the month), prompt, output.
fn parse(line: &str) -> Option<(f64, u32, u32)> {
    let mut fields = line.trim().split(',');
    let (date, time) = fields.next()?.split_once(' ')?;
    let day: f64 = date.rsplit('-').next()?.parse().ok()?;
    let mut seconds = day * 86_400.0;
    for (part, unit) in time.split(':').zip([3_600.0, 60.0, 1.0]) {
        seconds += part.parse::<f64>().ok()? * unit;
    }
    let mut count = || fields.next()?.trim().parse::<u32>().ok();
    Some((seconds, count()?.max(1), count()?.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_times_and_lengths() {
        let (seconds, input, output) = parse("2023-11-16 18:17:04.0319600,3180,8").unwrap();
        assert!((seconds - (16.0 * 86_400.0 + 18.0 * 3_600.0 + 17.0 * 60.0 + 4.031_96)).abs() < 1e-6);
        assert_eq!((input, output), (3_180, 8));
        assert_eq!(parse("yesterday,1,2"), None);
    }
}
