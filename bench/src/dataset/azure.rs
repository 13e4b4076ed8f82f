//! An Azure LLM inference trace (2023): a CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`, a request a line.
//!
//! It has no texts and does not say what prompts share, so every prompt is made of blocks of its own.

use std::time::Duration;

use anyhow::{Context, ensure};

use super::blocks::{BlockWriter, Recipe};
use super::trace::{Recorded, Replay};
use super::{Dataset, read_file};
use crate::args::DatasetArgs;

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// The first `wanted` requests that are short enough, or all.
///
/// # Errors
/// A file that cannot be read, another header, or a line that is no such request; the message names the line.
pub fn read(args: &DatasetArgs, wanted: Option<usize>, writer: BlockWriter) -> anyhow::Result<Dataset> {
    let file = read_file(args.dataset_path.as_deref())?;
    let mut lines = file.lines().enumerate();
    let header = lines.next().map_or("", |(_, line)| line.trim_start_matches('\u{feff}').trim());
    ensure!(header == HEADER, "the azure dataset must begin with the line {HEADER}, not {header:?}");
    let mut replay = Replay::new(args.trace_context_len, wanted);
    let mut next_block = 0;
    for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        if !replay.wants_more() {
            break;
        }
        let (at, input_tokens, output_tokens) =
            request(line.trim()).with_context(|| format!("line {} of the azure dataset", index + 1))?;
        let blocks = (next_block..).take(input_tokens.div_ceil(writer.block_tokens()) as usize).collect();
        let recipe = Recipe { blocks, tokens: input_tokens };
        next_block += recipe.blocks.len() as u64;
        replay.add(Recorded { at, recipe, output_tokens });
    }
    replay.finish(writer)
}

fn request(line: &str) -> anyhow::Result<(Duration, u64, u64)> {
    let expected = || format!("expected 2023-11-16 18:17:03.9799600,4808,10 or the like, not {line:?}");
    let mut fields = line.split(',');
    let (Some(at), Some(input), Some(output), None) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        anyhow::bail!(expected());
    };
    let tokens = |text: &str| text.trim().parse::<u32>().ok().map(u64::from);
    let request = || Some((time(at)?, tokens(input).filter(|tokens| *tokens > 0)?, tokens(output)?));
    request().with_context(expected)
}

/// Time of `YYYY-MM-DD hh:mm:ss.fffffff` since the year 0, by a calendar good enough for differences.
fn time(text: &str) -> Option<Duration> {
    let (date, clock) = text.trim().split_once([' ', 'T'])?;
    let mut parts = date.splitn(3, '-').map(str::parse::<u64>);
    let (year, month, day) = (parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?);
    let clock = clock.split_once('+').map_or(clock, |(clock, _)| clock); // later traces carry a zone, always +00:00
    let mut parts = clock.splitn(3, ':');
    let (hour, minute) = (parts.next()?.parse::<u64>().ok()?, parts.next()?.parse::<u64>().ok()?);
    let second: f64 = parts.next()?.parse().ok()?;
    let in_range =
        year <= 9_999 && (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60;
    if !in_range || !(0.0..61.0).contains(&second) {
        return None;
    }
    let seconds = days(year, month, day) * 86_400 + hour * 3_600 + minute * 60;
    Some(Duration::from_secs(seconds) + Duration::from_secs_f64(second))
}

/// Days since 0000-03-01 (a date before it counts as that day), in years that begin in March so that leap days come last.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year.saturating_sub(1), month + 9) };
    year * 365 + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_differ_by_what_lies_between_them() {
        let between = |from, to| time(to).unwrap() - time(from).unwrap();
        let ms = Duration::from_millis;
        assert_eq!(between("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0799600"), ms(100));
        assert_eq!(between("2023-11-30 23:59:59", "2023-12-01 00:00:01.5"), ms(2500));
        assert_eq!(between("2024-02-28 00:00:00", "2024-03-01T00:00:00"), ms(2 * 86_400_000), "a leap year");
        assert_eq!(between("2023-12-31 00:00:00+00:00", "2024-01-01 00:00:00+00:00"), ms(86_400_000));
    }

    #[test]
    fn refuses_lines_that_are_no_requests() {
        for line in [
            "",
            "2023-11-16 18:17:03,1",
            "yesterday,1,1",
            "2023-13-16 18:17:03,1,1",
            "2023-11-16 18:17:03,0,1",
            "2023-11-16 18:17:03,1,18446744073709551615",
            "18446744073709551615-11-16 18:17:03,1,1",
        ] {
            let error = request(line).unwrap_err().to_string();
            assert!(error.contains("4808,10"), "{line}: {error}");
        }
        assert_eq!(request("2023-11-16 18:17:03.5,7,0").unwrap().1, 7);
    }
}
