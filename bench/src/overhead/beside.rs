//! Routers side by side: all of them run, and are loaded in turn, a short while each, many times over. What the machine does to one of them
//! it does to the others a moment later, so that differences of a few microseconds can be told where absolute figures move by a third.
//!
//! Next on the path: [`super::load`].

use std::str::FromStr;
use std::sync::Arc;

use serde::Serialize;

use super::load::Load;
use super::mocks::Plan;
use super::rig::Rig;
use super::tally::Tally;
use super::workload::Delivery;

/// Connections of different turns draw different prompts.
const SEEDS_A_TURN: u64 = 1 << 20;

/// A router that runs beside the one under test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// Its name in the report.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Where it serves.
    pub base_url: String,
}

impl FromStr for Neighbour {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(3, '=');
        let (name, pid, url) = (parts.next(), parts.next(), parts.next());
        match (name, pid.and_then(|pid| pid.parse().ok()), url) {
            (Some(name), Some(pid), Some(url)) if !name.is_empty() => {
                Ok(Self { name: name.to_owned(), pid, base_url: url.to_owned() })
            }
            _ => Err(format!("{text:?} is not NAME=PID=URL, e.g. haproxy=4711=http://127.0.0.1:8080")),
        }
    }
}

/// What routers cost side by side, with bodies of one size.
#[derive(Debug, Clone, Serialize)]
pub struct Beside {
    /// Size of a body.
    pub kilobytes: usize,
    /// How often each had its turn.
    pub turns: usize,
    /// The router under test, and those beside it.
    pub routers: Vec<Standing>,
}

/// One of them.
#[derive(Debug, Clone, Serialize)]
pub struct Standing {
    /// Its name.
    pub router: String,
    /// CPU a request in microseconds: the median of its turns.
    pub cpu_us_per_request: f64,
    /// The lowest and the highest of them.
    pub range: (f64, f64),
    /// Median of what it took beyond the router under test in the same turn, in microseconds.
    pub beyond_first_us: f64,
    /// Median of what it took over what the router under test did in the same turn.
    pub over_first: f64,
    /// Requests that were answered.
    pub requests: u64,
    /// Failed requests.
    pub errors: u64,
}

/// Measures [`Beside`]: the first of `rigs` is the router under test.
///
/// # Errors
/// A router is gone, or answered nothing in one of its turns.
pub async fn measure(rigs: &[(String, Rig)], kilobytes: usize, turns: usize) -> anyhow::Result<Beside> {
    let mut seen: Vec<Vec<f64>> = vec![Vec::new(); rigs.len()];
    let mut counts = vec![(0, 0); rigs.len()];
    for turn in 0..turns {
        for (at, (name, rig)) in rigs.iter().enumerate() {
            let Turn { cpu_us, requests, errors } = one_turn(rig, kilobytes, turn).await?;
            counts[at] = (counts[at].0 + requests, counts[at].1 + errors);
            seen[at].push(cpu_us.ok_or_else(|| anyhow::anyhow!("{name} answered nothing in turn {turn}"))?);
        }
    }
    let standing = |(at, (router, _)): (usize, &(String, Rig))| {
        let pairs = || seen[at].iter().zip(&seen[0]);
        let (least, most) = seen[at]
            .iter()
            .fold((f64::INFINITY, 0.0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
        Standing {
            router: router.clone(),
            cpu_us_per_request: median(seen[at].iter().copied()),
            range: (least, most),
            beyond_first_us: median(pairs().map(|(own, first)| own - first)),
            over_first: median(pairs().map(|(own, first)| own / first)),
            requests: counts[at].0,
            errors: counts[at].1,
        }
    };
    Ok(Beside { kilobytes, turns, routers: rigs.iter().enumerate().map(standing).collect() })
}

/// What a router did in one turn.
struct Turn {
    /// CPU a request, in microseconds.
    cpu_us: Option<f64>,
    requests: u64,
    errors: u64,
}

async fn one_turn(rig: &Rig, kilobytes: usize, turn: usize) -> anyhow::Result<Turn> {
    let tally = Arc::<Tally>::default();
    let workload = Arc::new(rig.workload(kilobytes, Delivery::Whole)?);
    rig.mocks.answer_with(Plan::Whole);
    let mut load = Load::seeded(&tally, turn as u64 * SEEDS_A_TURN);
    load.spawn(rig.connections, &rig.addresses, &workload, |lane, rng| lane.closed_loop(u64::MAX, rng));
    let usage = rig.watch(&tally, |usage| usage.requests).await?;
    load.stop().await;
    let cpu_us = usage.cpu_us_each(usage.requests);
    Ok(Turn { cpu_us, requests: usage.requests, errors: tally.errors().values().sum() })
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        count if count % 2 == 1 => values[count / 2],
        count => f64::midpoint(values[count / 2 - 1], values[count / 2]),
    }
}
