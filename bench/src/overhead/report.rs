//! What is printed and written: a row of the table that compares routers, what it leaves out, and a JSON line.
//!
//! Pure text from figures. Next on the path: nothing.

use std::fmt::Write;

use serde::Serialize;

use super::beside::{Beside, Standing};
use super::latency::Latency;
use super::machine::Machine;
use super::memory::{AfterRequests, IdleStreams};
use super::rates::Rate;
use super::rig::Usage;
use super::streams::Streams;

/// Everything measured; what was not asked for, or cannot be known, is absent.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Figures {
    /// Memory before any load, in MB.
    pub rss_idle_mb: Option<f64>,
    /// Memory after many 1-KB requests.
    pub after_requests: Option<AfterRequests>,
    /// By size.
    pub rates: Vec<Rate>,
    /// Beside other routers, by size.
    pub beside: Vec<Beside>,
    /// At a fixed rate.
    pub latency: Option<Latency>,
    /// Paced streams.
    pub paced: Option<Streams>,
    /// Flooding streams.
    pub flood: Option<Streams>,
    /// Memory after all of these, in MB.
    pub rss_end_mb: Option<f64>,
    /// Most memory that the processes ever had until then, in MB.
    pub rss_peak_mb: Option<f64>,
    /// Idle streams.
    pub idle_streams: Option<IdleStreams>,
}

/// A result with all that is needed to make it again.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Name of the router.
    pub router: String,
    /// Its version, if one was given.
    pub router_version: Option<String>,
    /// Free text.
    pub tag: Option<String>,
    /// Seconds since 1970 at the beginning.
    pub unix_time: u64,
    /// Commit of the working directory.
    pub commit: Option<String>,
    /// Version of this program.
    pub bench_version: &'static str,
    /// How this program was called.
    pub command_line: Vec<String>,
    /// Where.
    pub machine: Machine,
    /// What came out.
    #[serde(flatten)]
    pub figures: Figures,
    /// Paths that no mock knew, and malformed requests.
    pub unknown_to_mocks: Vec<String>,
    /// What a reader of the figures has to know.
    pub notes: Vec<String>,
}

/// A line for each router.
fn side_by_side(Beside { kilobytes, turns, routers }: &Beside) -> String {
    let mut text = format!("side by side, {kilobytes} KB, {turns} turns each, CPU µs a request:\n");
    for one in routers {
        let _ = write!(
            text,
            "  {}: {:.2} ({:.2} to {:.2})",
            one.router, one.cpu_us_per_request, one.range.0, one.range.1
        );
        let _ = write!(text, ", {:+.2} beyond the first, {:.3} of it", one.beyond_first_us, one.over_first);
        let _ = writeln!(
            text,
            "{}",
            if one.errors > 0 { format!(", {} errors", one.errors) } else { String::new() }
        );
    }
    text
}

const ABSENT: &str = "–";
/// Waiting for a core beyond this share makes a figure doubtful.
const DISTURBED_PERCENT: f64 = 5.0;

impl Report {
    /// The row with its header.
    pub fn table(&self) -> String {
        let figures = &self.figures;
        let mut header = vec!["router".to_owned()];
        let mut row = vec![self.router.clone()];
        let mut add = |name: String, value: String| {
            header.push(name);
            row.push(value);
        };
        let first = figures.rates.first();
        if let Some(first) = first {
            add(format!("req/s {} KB", first.kilobytes), format!("{:.0}", first.requests_per_s));
        }
        for rate in &figures.rates {
            add(format!("CPU µs {} KB", rate.kilobytes), digits(rate.cpu_us_per_request));
        }
        if let Some(latency) = &figures.latency {
            let value = format!("{:.2}/{:.2}", latency.p50_ms, latency.p99_ms);
            add(format!("p50/p99 ms at {}/s", latency.rate_per_s), value);
        }
        if let Some(first) = first {
            add("hit %".to_owned(), whole(first.usage.hit_percent));
        }
        for (name, streams) in [("paced", &figures.paced), ("flooding", &figures.flood)] {
            if let Some(streams) = streams {
                add(format!("CPU µs a {name} SSE chunk"), digits(streams.cpu_us_per_chunk));
            }
        }
        let after = figures.after_requests.as_ref();
        let requests = after.map_or("n".to_owned(), |after| thousands(after.usage.requests));
        let stages =
            [figures.rss_idle_mb, after.and_then(|after| after.rss_mb), figures.rss_end_mb].map(whole);
        add(format!("RSS MB idle → after {requests} requests → end"), stages.join(" → "));
        if let Some(idle) = &figures.idle_streams {
            add(format!("RSS KB an idle stream of {}", idle.streams), digits(idle.rss_kb_per_stream));
        }
        add("errors".to_owned(), self.error_count().to_string());
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = format!("|{}\n", "---|".repeat(header.len()));
        [line(&header), rule, line(&row)].concat()
    }

    /// What the row leaves out: errors by reason, and everything that makes a figure doubtful.
    pub fn remarks(&self) -> String {
        let mut text = String::new();
        for rate in &self.figures.rates {
            let (per_s, hits) = (rate.requests_per_s, whole(rate.usage.hit_percent));
            let _ = writeln!(text, "{} KB: {per_s:.0} requests/s, {hits} % hits", rate.kilobytes);
        }
        self.figures.beside.iter().for_each(|beside| text.push_str(&side_by_side(beside)));
        for (name, streams) in [("paced", &self.figures.paced), ("flood", &self.figures.flood)] {
            if let Some(Streams { streams, chunks_per_s, .. }) = streams {
                let _ = writeln!(text, "{name}: {chunks_per_s:.0} chunks/s over {streams} streams");
            }
        }
        for (part, usage) in self.usages() {
            text.push_str(&remarks_on(&part, usage));
        }
        if let Some(latency) = &self.figures.latency {
            let _ = writeln!(
                text,
                "latency: 99 % of requests were sent within {:.3} ms of being due",
                latency.lateness_p99_ms
            );
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        if !self.unknown_to_mocks.is_empty() {
            let _ = writeln!(text, "note: the mocks did not know: {}", self.unknown_to_mocks.join(", "));
        }
        text
    }

    /// Failed requests of all parts.
    pub fn error_count(&self) -> u64 {
        let in_turns: u64 = self.standings().map(|standing| standing.errors).sum();
        in_turns + self.usages().iter().map(|(_, usage)| usage.error_count()).sum::<u64>()
    }

    /// Good answers and chunks of all parts: a run without any has measured nothing.
    pub fn success_count(&self) -> u64 {
        let in_turns: u64 = self.standings().map(|standing| standing.requests).sum();
        in_turns + self.usages().iter().map(|(_, usage)| usage.requests + usage.chunks).sum::<u64>()
    }

    fn standings(&self) -> impl Iterator<Item = &Standing> {
        self.figures.beside.iter().flat_map(|beside| &beside.routers)
    }

    fn usages(&self) -> Vec<(String, &Usage)> {
        let figures = &self.figures;
        let named = |name: &str, usage| (name.to_owned(), usage);
        let mut usages = Vec::new();
        usages.extend(figures.after_requests.iter().map(|part| named("rss", &part.usage)));
        usages.extend(figures.rates.iter().map(|rate| (format!("{} KB", rate.kilobytes), &rate.usage)));
        usages.extend(figures.latency.iter().map(|part| named("latency", &part.usage)));
        usages.extend(figures.paced.iter().map(|part| named("paced", &part.usage)));
        usages.extend(figures.flood.iter().map(|part| named("flood", &part.usage)));
        usages.extend(figures.idle_streams.iter().map(|part| named("idle", &part.usage)));
        usages
    }
}

/// What a reader of one part's figures has to know.
fn remarks_on(part: &str, usage: &Usage) -> String {
    let mut text = String::new();
    for (error, count) in &usage.errors {
        let _ = writeln!(text, "error: {part}: {count} × {error}");
    }
    if usage.untagged > 0 {
        let _ = writeln!(text, "note: {part}: {} requests without their system prompt", usage.untagged);
    }
    let busy = usage.bench_busy_percent;
    let _ = writeln!(text, "{part}: generator and mocks took {busy:.0} % of their core");
    let (router, bench) = (usage.router_waited_percent.unwrap_or(0.0), usage.bench_waited_percent);
    if router.max(bench) > DISTURBED_PERCENT {
        let _ = writeln!(
            text,
            "note: {part}: not a quiet machine: the router waited for its core {router:.0} % of the time, the generator \
             {bench:.0} %"
        );
    }
    text
}

fn digits(value: Option<f64>) -> String {
    value.map_or(ABSENT.to_owned(), |value| format!("{value:.1}"))
}

fn whole(value: Option<f64>) -> String {
    value.map_or(ABSENT.to_owned(), |value| format!("{value:.0}"))
}

fn thousands(count: u64) -> String {
    if count >= 10_000 { format!("{}k", count / 1000) } else { count.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(figures: Figures) -> Report {
        Report {
            router: "r".to_owned(),
            router_version: None,
            tag: None,
            unix_time: 0,
            commit: None,
            bench_version: "0",
            command_line: Vec::new(),
            machine: Machine { cpu_model: None, cores: 2, kernel: None, load_average: None },
            figures,
            unknown_to_mocks: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn rate(kilobytes: usize, cpu_us_per_request: Option<f64>) -> Rate {
        let errors = [("status 500".to_owned(), 2)].into();
        let usage = Usage { requests: 10, hit_percent: Some(24.6), errors, ..Usage::default() };
        Rate { kilobytes, requests_per_s: 93_742.6, cpu_us_per_request, usage }
    }

    #[test]
    fn a_row_has_what_was_measured_and_dashes_for_what_cannot_be_known() {
        let figures = Figures {
            rss_idle_mb: Some(15.4),
            rss_end_mb: Some(16.0),
            rates: vec![rate(1, Some(10.44)), rate(16, None)],
            ..Figures::default()
        };
        let report = report(figures);
        let table = report.table();
        assert_eq!(
            table.lines().collect::<Vec<_>>(),
            [
                "| router | req/s 1 KB | CPU µs 1 KB | CPU µs 16 KB | hit % | RSS MB idle → after n requests → end | errors |",
                "|---|---|---|---|---|---|---|",
                "| r | 93743 | 10.4 | – | 25 | 15 → – → 16 | 4 |",
            ]
        );
        assert!(report.remarks().contains("error: 16 KB: 2 × status 500\n"), "{}", report.remarks());
        assert_eq!((report.error_count(), report.success_count()), (4, 20));
    }

    #[test]
    fn routers_side_by_side_are_a_measurement_of_their_own() {
        let standing = Standing {
            router: "r".to_owned(),
            cpu_us_per_request: 20.0,
            range: (19.0, 21.0),
            beyond_first_us: 0.0,
            over_first: 1.0,
            requests: 700,
            errors: 2,
        };
        let beside = Beside { kilobytes: 1, turns: 3, routers: vec![standing] };
        let report = report(Figures { beside: vec![beside], ..Figures::default() });
        assert_eq!((report.error_count(), report.success_count()), (2, 700));
    }

    #[test]
    fn a_busy_machine_is_named() {
        let quiet = Usage { router_waited_percent: Some(1.0), ..Usage::default() };
        assert!(!remarks_on("paced", &quiet).contains("quiet"));
        let busy = Usage { router_waited_percent: Some(7.0), ..quiet };
        assert!(remarks_on("paced", &busy).contains("note: paced: not a quiet machine: the router waited"));
    }
}
