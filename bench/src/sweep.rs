//! `bench sweep`: the same server at every concurrency and every input length, as one table and one plot.
//!
//! Each cell is a run of [`crate::run`] with prompts of its own, so that no cell finds another's in the prefix cache.
//! Next on the path: [`crate::plot`].

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;

use crate::args::{DatasetName, ServeArgs};
use crate::plot::{Axis, Chart, Scale, Series, svg};
use crate::report::{Summary, warnings};
use crate::run;

/// Everything `bench sweep` takes.
#[derive(Debug, Clone, Args)]
pub struct SweepArgs {
    /// Numbers of requests in flight
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8,16,32,64",
          value_parser = clap::value_parser!(u32).range(1..), help_heading = "Sweep")]
    pub concurrencies: Vec<u32>,
    /// Lengths of the prompts in tokens
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "128,1024",
          value_parser = clap::value_parser!(u64).range(1..), help_heading = "Sweep")]
    pub input_lens: Vec<u64>,
    /// Requests of a cell: this many times its concurrency (1 sends all at once and waits, as in the recorded sweeps)
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..),
          help_heading = "Sweep")]
    pub rounds: u32,
    /// File for the plot
    #[arg(long, value_name = "FILE.svg", help_heading = "Sweep")]
    pub plot: Option<PathBuf>,
    /// What all cells have in common; --output-file gets a JSON line for each.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// One finished cell.
#[derive(Debug, Clone)]
pub struct Cell {
    /// Length of its prompts.
    pub input_len_tokens: u64,
    /// Requests in flight.
    pub concurrency: u32,
    /// What came out.
    pub summary: Summary,
}

/// Runs `bench sweep`: measures cell after cell, prints the table, writes JSON lines and the plot.
///
/// # Errors
/// As [`run::measure`], flags that contradict the grid, and a plot that cannot be written.
pub fn sweep(args: &SweepArgs) -> anyhow::Result<Vec<Cell>> {
    args.validate()?;
    let total = args.input_lens.len() * args.concurrencies.len();
    let mut cells = Vec::with_capacity(total);
    for input_len_tokens in &args.input_lens {
        for concurrency in &args.concurrencies {
            println!(
                "\ncell {} of {total}: input {input_len_tokens}, concurrency {concurrency}",
                cells.len() + 1
            );
            let serve = args.cell(*input_len_tokens, *concurrency, cells.len() as u64);
            let (summary, records) = run::measure(&serve)?;
            run::append_json_line(&serve, &summary, &records)?;
            cells.push(Cell { input_len_tokens: *input_len_tokens, concurrency: *concurrency, summary });
        }
    }
    print!("\n{}", table(&cells));
    if let Some(path) = &args.plot {
        let written = std::fs::write(path, svg(&charts(&cells)));
        written.with_context(|| format!("cannot write --plot {}", path.display()))?;
    }
    Ok(cells)
}

impl SweepArgs {
    fn validate(&self) -> anyhow::Result<()> {
        let (traffic, dataset) = (&self.serve.traffic, &self.serve.dataset);
        let mut problems = Vec::new();
        for (flag, given, instead) in [
            ("--num-prompts", traffic.num_prompts.is_some(), "--rounds"),
            ("--max-concurrency", traffic.max_concurrency.is_some(), "--concurrencies"),
            (
                "--dataset-name",
                dataset.dataset_name != DatasetName::Random,
                "random, whose lengths can be set",
            ),
            (
                "--random-range-ratio",
                dataset.random_range_ratio != 0.0,
                "nothing: all prompts of a cell are equally long",
            ),
        ] {
            if given {
                problems.push(format!("a sweep sets {flag} itself; use {instead}"));
            }
        }
        if problems.is_empty() { Ok(()) } else { bail!(problems.join("\n       ")) }
    }

    /// The run of one cell.
    fn cell(&self, input_len_tokens: u64, concurrency: u32, number: u64) -> ServeArgs {
        let mut serve = self.serve.clone();
        serve.traffic.max_concurrency = Some(concurrency);
        serve.traffic.num_prompts = Some(concurrency as usize * self.rounds as usize);
        serve.traffic.seed = serve.traffic.seed.wrapping_add(number << 32); // no two cells share prompts
        serve.dataset.random_input_len = input_len_tokens;
        serve.dataset.random_range_ratio = 1.0;
        serve
    }
}

/// All cells, a line each.
pub fn table(cells: &[Cell]) -> String {
    const NEVER_FAILS: &str = "writing to a string cannot fail";
    let mut out = String::new();
    writeln!(
        out,
        "{:>9} {:>6} {:>7} {:>6} {:>9} {:>8} {:>10} {:>10} {:>10} {:>10} {:>9} {:>9}",
        "input len",
        "conc.",
        "success",
        "failed",
        "time s",
        "req/s",
        "out tok/s",
        "tot tok/s",
        "TTFT ms",
        "p99 TTFT",
        "TPOT ms",
        "p99 ITL"
    )
    .expect(NEVER_FAILS);
    for cell in cells {
        let stats = &cell.summary.statistics;
        writeln!(
            out,
            "{:>9} {:>6} {:>7} {:>6} {:>9.2} {:>8.2} {:>10.2} {:>10.2} {:>10.2} {:>10.2} {:>9.2} {:>9.2}",
            cell.input_len_tokens,
            cell.concurrency,
            stats.completed_requests,
            stats.failed_requests,
            stats.duration.as_secs_f64(),
            stats.request_throughput,
            stats.output_throughput,
            stats.total_throughput,
            stats.ttft.mean_ms(),
            stats.ttft.percentile_ms(99.0),
            stats.tpot.mean_ms(),
            stats.itl.percentile_ms(99.0),
        )
        .expect(NEVER_FAILS);
    }
    out.push_str("TTFT and TPOT are means over requests\n");
    let runs = cells.iter().map(|cell| {
        (format!("input {}, concurrency {}", cell.input_len_tokens, cell.concurrency), &cell.summary)
    });
    out.push_str(&warnings::of_runs(runs));
    out
}

/// Throughput, TTFT and TPOT over concurrency, a line for each input length.
pub fn charts(cells: &[Cell]) -> Vec<Chart> {
    let mut lengths: Vec<u64> = cells.iter().map(|cell| cell.input_len_tokens).collect();
    lengths.dedup();
    let chart = |title: &str, unit: &str, scale, value: fn(&Cell) -> f64| {
        let series = lengths.iter().map(|length| {
            let of_length = cells.iter().filter(|cell| cell.input_len_tokens == *length);
            let points = of_length.map(|cell| (f64::from(cell.concurrency), value(cell))).collect();
            Series { name: format!("{length} input tokens"), points }
        });
        Chart {
            title: title.to_owned(),
            x: Axis { label: "concurrency".to_owned(), scale: Scale::Log },
            y: Axis { label: unit.to_owned(), scale },
            series: series.collect(),
        }
    };
    vec![
        chart("Output throughput", "tokens/s", Scale::Linear, |cell| {
            cell.summary.statistics.output_throughput
        }),
        chart("Mean TTFT", "ms", Scale::Log, |cell| cell.summary.statistics.ttft.mean_ms()),
        chart("Mean TPOT", "ms", Scale::Log, |cell| cell.summary.statistics.tpot.mean_ms()),
    ]
}
