//! Traces in Mooncake's format: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids` of 512-token blocks.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::Context;
use router_core::{Precedence, Priority};
use serde::Deserialize;

use super::{BLOCK_TOKENS, Draft, Workload};

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
    #[serde(default)]
    session_id: Option<u64>,
    #[serde(default)]
    tenant: Option<u64>,
    #[serde(default)]
    priority: i8,
}

/// Reads a trace.
///
/// # Errors
/// A file that cannot be read, a line that is not of the format, or that has too few ids for its length.
pub fn read(path: &Path) -> anyhow::Result<Workload> {
    let file = File::open(path).with_context(|| format!("cannot read the trace {}", path.display()))?;
    let name = path.file_stem().map_or_else(|| "trace".into(), |stem| stem.to_string_lossy().into_owned());
    let mut workload = Workload::named(name);
    // Ids of any size become small ones, in order of appearance.
    let mut known: HashMap<u64, u32> = HashMap::new();
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let place = || format!("{} line {number}", path.display());
        let line = line.with_context(place)?;
        if line.trim().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_str(&line).with_context(|| {
            format!("{}: expected timestamp, input_length, output_length and hash_ids", place())
        })?;
        let blocks = (line.input_length as usize).div_ceil(BLOCK_TOKENS);
        anyhow::ensure!(
            line.hash_ids.len() + 1 >= blocks,
            "{}: {} hash_ids for {} tokens; a block has {BLOCK_TOKENS}",
            place(),
            line.hash_ids.len(),
            line.input_length
        );
        let ids = line.hash_ids.iter().take(blocks).map(|id| {
            let new = u32::try_from(known.len()).unwrap_or(u32::MAX >> 1);
            *known.entry(*id).or_insert(new)
        });
        let draft = Draft {
            at_s: line.timestamp / 1e3,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            session: line.session_id,
            after: None,
            precedence: Precedence { priority: Priority(line.priority), tenant: line.tenant },
        };
        let ids: Vec<u32> = ids.collect();
        workload.push(draft, ids);
    }
    anyhow::ensure!(!workload.requests.is_empty(), "{} has no requests", path.display());
    workload.sort();
    Ok(workload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lines_and_says_which_one_is_wrong() {
        let folder = std::env::temp_dir().join(format!("roundhouse-trace-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let good = folder.join("good.jsonl");
        let text =
            "{\"timestamp\": 1500, \"input_length\": 600, \"output_length\": 2, \"hash_ids\": [900, 7]}\n\n";
        std::fs::write(&good, text).unwrap();
        let workload = read(&good).unwrap();
        assert_eq!((workload.name.as_str(), workload.requests[0].at_s), ("good", 1.5));
        assert_eq!(workload.ids(&workload.requests[0]), [0, 1]);
        let bad = folder.join("bad.jsonl");
        std::fs::write(&bad, text.replace("[900, 7]", "[]")).unwrap();
        assert!(read(&bad).unwrap_err().to_string().contains("line 1: 0 hash_ids for 600 tokens"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
