//! What may follow the address of a worker, or of a source of workers: `?KEY=VALUE`, and more behind `&`.

use router_core::{DpRanks, Role, ToldBy, WorkerSpec};

/// More ranks than any engine has behind one address. Each is a worker, with probes and connections of its own.
const MOST_RANKS: u16 = 1_024;
/// What `dp_by` may be, and what it means.
const TOLD_BY: [(&str, ToldBy); 3] = [
    ("header", ToldBy::Header),
    ("routed_dp_rank", ToldBy::Field("routed_dp_rank")),
    ("data_parallel_rank", ToldBy::Field("data_parallel_rank")),
];

/// What was written behind an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Options {
    /// Where those that generate ask for prompts.
    pub(super) bootstrap_port: Option<u16>,
    /// The ranks behind the address, if each is to be a worker.
    pub(super) dp_ranks: Option<DpRanks>,
}

impl Options {
    /// Takes the options of a worker with this role off.
    ///
    /// # Errors
    /// What is wrong with them, and what would be right.
    pub(super) fn split(text: &str, role: Role) -> Result<(&str, Self), String> {
        let Some((address, list)) = text.trim().split_once('?') else { return Ok((text, Self::default())) };
        let (mut options, mut count, mut told_by) = (Self::default(), None, None);
        for option in list.split('&') {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            let is_new = match (key.trim(), value.trim(), role) {
                ("bootstrap_port", port, Role::Prefill) => {
                    options.bootstrap_port.replace(bootstrap_port(text, port)?).is_none()
                }
                ("dp", number, _) => count.replace(rank_count(text, number)?).is_none(),
                ("dp_by", word, _) => told_by.replace(told(text, word)?).is_none(),
                _ => return Err(unknown(text, option, role)),
            };
            if !is_new {
                return Err(format!("{text:?} says {key} twice"));
            }
        }
        if told_by.is_some() && count.is_none() {
            return Err(format!("{text:?} says how ranks are told, but not how many there are: dp=RANKS"));
        }
        let told_by = told_by.unwrap_or_default();
        options.dp_ranks = count.map(|count| DpRanks { count, told_by });
        Ok((address, options))
    }

    /// The worker, or one for each of its ranks.
    pub(super) fn workers(self, spec: WorkerSpec) -> Vec<WorkerSpec> {
        let spec = WorkerSpec { bootstrap_port: self.bootstrap_port, ..spec };
        match self.dp_ranks {
            Some(ranks) => ranks.of(&spec).collect(),
            None => vec![spec],
        }
    }

    /// # Errors
    /// When there are ranks and `scheme` has no way to say which is meant.
    pub(super) fn check_scheme(self, scheme: &str, text: &str) -> Result<(), String> {
        if self.dp_ranks.is_some() && ["grpc", "embedded"].contains(&scheme) {
            return Err(format!("{text:?} has no data-parallel ranks; dp=RANKS is for engines over HTTP"));
        }
        Ok(())
    }
}

fn bootstrap_port(text: &str, port: &str) -> Result<u16, String> {
    let parsed = port.parse::<u16>().ok().filter(|port| *port != 0);
    parsed.ok_or_else(|| {
        format!("{text:?} has no valid port after \"bootstrap_port=\"; write one such as 8998")
    })
}

fn rank_count(text: &str, number: &str) -> Result<u16, String> {
    let parsed = number.parse::<u16>().ok().filter(|count| (1..=MOST_RANKS).contains(count));
    parsed.ok_or_else(|| {
        format!("{text:?} has no number of ranks after \"dp=\"; write one from 1 to {MOST_RANKS}")
    })
}

fn told(text: &str, word: &str) -> Result<ToldBy, String> {
    let known = TOLD_BY.iter().find(|(known, _)| *known == word);
    let words = TOLD_BY.map(|(known, _)| known).join(", ");
    known.map(|(_, told_by)| *told_by).ok_or_else(|| format!("{text:?} says dp_by={word}; there are {words}"))
}

fn unknown(text: &str, option: &str, role: Role) -> String {
    let prefill = if role == Role::Prefill { ", and bootstrap_port=PORT" } else { "" };
    let words = TOLD_BY.map(|(known, _)| known).join("|");
    format!(
        "{text:?} has more than host and port; behind ? there may be dp=RANKS and dp_by={words}{prefill}, and no {option:?}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_follow_an_address() {
        let ranks = |count, told_by| Some(DpRanks { count, told_by });
        for (text, address, bootstrap_port, dp_ranks) in [
            ("a=http://p:1", "a=http://p:1", None, None),
            ("p?bootstrap_port=7", "p", Some(7), None),
            ("p?dp=8", "p", None, ranks(8, ToldBy::Header)),
            ("p?dp=8&dp_by=header", "p", None, ranks(8, ToldBy::Header)),
            (
                "a=p:1?dp_by=routed_dp_rank&bootstrap_port=7&dp=2",
                "a=p:1",
                Some(7),
                ranks(2, ToldBy::Field("routed_dp_rank")),
            ),
        ] {
            let expected = (address, Options { bootstrap_port, dp_ranks });
            assert_eq!(Options::split(text, Role::Prefill), Ok(expected));
        }
    }

    #[test]
    fn errors_say_what_would_be_right() {
        for (text, expected) in [
            ("a?x=1", "bootstrap_port=PORT"),
            ("a?", "dp=RANKS"),
            ("a?dp", "from 1 to 1024"),
            ("a?dp=0", "from 1 to 1024"),
            ("a?dp=1025", "from 1 to 1024"),
            ("a?dp=2&dp=2", "dp twice"),
            ("a?dp=2&dp_by=body", "header, routed_dp_rank, data_parallel_rank"),
            ("a?dp_by=header", "how many"),
            ("a?bootstrap_port=x", "8998"),
        ] {
            let error = Options::split(text, Role::Prefill).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let error = Options::split("a?bootstrap_port=1", Role::Generate).unwrap_err();
        assert!(error.contains("no \"bootstrap_port=1\""), "{error}");
    }
}
