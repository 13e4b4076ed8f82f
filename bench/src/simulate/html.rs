//! `--html FILE`: all cells as one page with plots, which needs nothing but a browser.
//!
//! For each trace the time to the first token over load, mean and P99, the share of prompt tokens found cached over the size of caches, and what
//! workers had in flight over time under ours; then the goals. What a plot leaves out (numbers of workers, and sizes or loads) is averaged. Next: [`plot`](crate::plot) draws.

use std::fmt::Write as _;

use super::comparison::{CellFigures, Comparison, geometric_mean};
use super::goals;
use super::in_flight::InFlightOverTime;
use super::outcome::Figures;
use super::summary::{self, HIGHEST_LOAD};
use crate::plot::{Axis, Chart, Scale, Series, svg};

/// What workers had in flight in one simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Watched {
    /// The trace and its fleet.
    pub trace: String,
    /// Offered over R*.
    pub load: f64,
    /// The cell, for people.
    pub title: String,
    /// What was seen.
    pub in_flight: InFlightOverTime,
}

/// The page. `watched` may lack traces: files of figures do not tell what workers had to do.
#[must_use]
pub fn page(comparison: &Comparison, watched: &[Watched]) -> String {
    let mut out = String::from(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>bench simulate</title></head>\n\
         <body style=\"font-family: sans-serif\">\n<h1>bench simulate</h1>\n",
    );
    let policies = comparison.policies();
    let mut traces: Vec<&str> = comparison.cells().map(|cell| cell.trace.as_str()).collect();
    traces.dedup();
    for trace in traces {
        let cells: Vec<&CellFigures> = comparison.cells().filter(|cell| cell.trace == trace).collect();
        out += &format!("<h2>{}</h2>\n{}", escape(trace), svg(&charts(&cells, &policies)));
        if let Some(watched) = watched.iter().find(|watched| watched.trace == trace) {
            out += &svg(&[over_time(watched)]);
        }
    }
    let lines = summary::lines(comparison).into_iter().chain(goals::lines(comparison));
    let text = lines.fold(String::new(), |mut text, line| {
        writeln!(text, "{}", escape(&line)).expect("writing to a string cannot fail");
        text
    });
    out + "<pre>" + &text + "</pre>\n</body></html>\n"
}

/// One plot of all cells together, geometric means, over load.
#[must_use]
pub fn overview(comparison: &Comparison) -> String {
    let policies = comparison.policies();
    let cells: Vec<&CellFigures> = comparison.cells().collect();
    let over_load = |title: &str, read: fn(&Figures) -> f64| Chart {
        title: title.to_owned(),
        x: Axis { label: "offered over R*".to_owned(), scale: Scale::Part },
        y: Axis { label: "ms".to_owned(), scale: Scale::Log },
        series: series(&cells, &policies, |cell| cell.load, read),
    };
    svg(&[
        over_load("Mean time to the first token", |figures| figures.mean_ttft_ms),
        over_load("P99 time to the first token", |figures| figures.p99_ttft_ms),
        over_load("Mean time to the last token", |figures| figures.mean_e2e_ms),
    ])
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn charts(cells: &[&CellFigures], policies: &[&str]) -> [Chart; 3] {
    let load = || Axis { label: "offered over R*".to_owned(), scale: Scale::Part };
    let ms = || Axis { label: "ms".to_owned(), scale: Scale::Log };
    let within: Vec<&CellFigures> = cells.iter().copied().filter(|cell| cell.load <= HIGHEST_LOAD).collect();
    let over_load = |title: &str, read: fn(&Figures) -> f64| Chart {
        title: title.to_owned(),
        x: load(),
        y: ms(),
        series: series(cells, policies, |cell| cell.load, read),
    };
    let blocks = |cell: &CellFigures| cell.blocks as f64;
    [
        over_load("Mean time to the first token", |figures| figures.mean_ttft_ms),
        over_load("P99 time to the first token", |figures| figures.p99_ttft_ms),
        Chart {
            title: "Prompt tokens found cached, up to load 1".to_owned(),
            x: Axis { label: "blocks of 512 tokens a worker".to_owned(), scale: Scale::Log },
            y: Axis { label: "%".to_owned(), scale: Scale::Linear },
            series: series(&within, policies, blocks, |figures| figures.hit_rate * 100.0),
        },
    ]
}

fn over_time(watched: &Watched) -> Chart {
    let Watched { title, in_flight: InFlightOverTime { seconds, most, mean, fewest }, .. } = watched;
    let line = |name: &str, values: &[f64]| Series {
        name: name.to_owned(),
        points: seconds.iter().copied().zip(values.iter().copied()).collect(),
    };
    Chart {
        title: format!("Requests in flight under ours, {title}"),
        x: Axis { label: "s".to_owned(), scale: Scale::Linear },
        y: Axis { label: "requests at a worker".to_owned(), scale: Scale::Linear },
        series: vec![line("most", most), line("mean", mean), line("fewest", fewest)],
    }
}

/// A line for each policy: `read` over `place`, averaged over the cells of one place.
fn series(
    cells: &[&CellFigures],
    policies: &[&str],
    place: impl Fn(&CellFigures) -> f64,
    read: fn(&Figures) -> f64,
) -> Vec<Series> {
    let mut places: Vec<f64> = cells.iter().map(|cell| place(cell)).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let line = |policy: &&str| {
        let at = |x: f64| -> Option<(f64, f64)> {
            let there = cells.iter().filter(|cell| place(cell) == x);
            let values: Vec<f64> = there.filter_map(|cell| cell.of(policy, read)).collect();
            (!values.is_empty()).then(|| (x, geometric_mean(values)))
        };
        Series { name: (*policy).to_owned(), points: places.iter().filter_map(|x| at(*x)).collect() }
    };
    policies.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::contender::Family;
    use crate::simulate::report::Line;

    #[test]
    fn a_page_has_plots_of_each_trace_and_the_goals() {
        let mut comparison = Comparison::default();
        for (policy, family) in [("prefix_aware", Family::Ours), ("kv_aware", Family::Peer)] {
            for (trace, load) in [("one", 0.7), ("one", 0.9), ("two<", 0.7)] {
                let figures = Figures { mean_ttft_ms: 100.0, p99_ttft_ms: 200.0, ..Figures::default() };
                let (policy, trace) = (policy.to_owned(), trace.to_owned());
                comparison.add(&Line {
                    policy,
                    family,
                    workers: 4,
                    blocks: 500,
                    load,
                    trace,
                    seed: 1,
                    figures,
                });
            }
        }
        let in_flight = InFlightOverTime {
            seconds: vec![0.0, 1.0],
            most: vec![2.0, 3.0],
            mean: vec![1.0, 2.0],
            fewest: vec![0.0, 1.0],
        };
        let watched =
            Watched { trace: "one".to_owned(), load: 0.9, title: "4 workers".to_owned(), in_flight };
        let page = page(&comparison, &[watched]);
        assert_eq!((page.matches("<svg").count(), page.matches("</svg>").count()), (3, 3));
        assert!(page.contains("Requests in flight under ours, 4 workers"));
        assert_eq!(overview(&comparison).matches("<svg").count(), 1);
        for part in ["<h2>one</h2>", "two&lt;", "prefix_aware", "kv_aware", "goals met"] {
            assert!(page.contains(part), "{part} is not in the page");
        }
        assert!(!page.contains("src=") && !page.contains("<script"), "nothing is fetched or run");
    }
}
