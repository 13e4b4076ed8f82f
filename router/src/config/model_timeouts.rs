//! Time limits of single models: `MODEL first-byte=30s idle=60s total=10m`.

use std::time::Duration;

use super::units::{TimeLimit, parse_duration, parse_time_limit};

/// What an operator says of one model's time limits. What is left out is as for all other models.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelTimeouts {
    /// The model, as requests name it.
    pub model: String,
    /// In place of `--first-byte-timeout`.
    pub first_byte: Option<TimeLimit>,
    /// In place of `--idle-timeout`.
    pub idle: Option<Duration>,
    /// In place of `--request-timeout`.
    pub total: Option<Duration>,
}

/// Reads all items of a list; what is wrong goes to `errors`.
pub(super) fn parse_model_timeouts(list: &[String], errors: &mut Vec<String>) -> Vec<ModelTimeouts> {
    let mut all: Vec<ModelTimeouts> = Vec::with_capacity(list.len());
    for item in list {
        match parse_item(item) {
            Ok(timeouts) if all.iter().any(|other| other.model == timeouts.model) => {
                errors.push(format!("model-timeouts: model {:?} is named twice", timeouts.model));
            }
            Ok(timeouts) => all.push(timeouts),
            Err(error) => errors.push(format!("model-timeouts: {error}")),
        }
    }
    all
}

fn parse_item(item: &str) -> Result<ModelTimeouts, String> {
    let wrong = |why: String| format!("{item:?}: {why}; write MODEL first-byte=30s idle=60s total=10m");
    let mut words = item.split_whitespace();
    let model = words.next().ok_or_else(|| wrong("names no model".to_owned()))?;
    let mut timeouts = ModelTimeouts { model: model.to_owned(), first_byte: None, idle: None, total: None };
    for word in words {
        let (key, value) = word.split_once('=').ok_or_else(|| wrong(format!("{word:?} is no KEY=TIME")))?;
        let given_before = match key {
            "first-byte" => timeouts.first_byte.replace(parse_time_limit(value).map_err(wrong)?).is_some(),
            "idle" => timeouts.idle.replace(parse_duration(value).map_err(wrong)?).is_some(),
            "total" => timeouts.total.replace(parse_duration(value).map_err(wrong)?).is_some(),
            _ => return Err(wrong(format!("there is no limit {key:?}, only first-byte, idle and total"))),
        };
        if given_before {
            return Err(wrong(format!("{key} is given twice")));
        }
    }
    if (timeouts.first_byte, timeouts.idle, timeouts.total) == (None, None, None) {
        return Err(wrong("has a model and no limit".to_owned()));
    }
    Ok(timeouts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &[&str]) -> (Vec<ModelTimeouts>, Vec<String>) {
        let list: Vec<_> = list.iter().map(|item| (*item).to_owned()).collect();
        let mut errors = Vec::new();
        (parse_model_timeouts(&list, &mut errors), errors)
    }

    #[test]
    fn reads_what_is_given_and_leaves_out_the_rest() {
        let (all, errors) = parse(&["org/m:1 first-byte=30s  total=10m", "n idle=500ms", "o first-byte=off"]);
        assert_eq!(errors, Vec::<String>::new());
        let limits: Vec<_> =
            all.iter().map(|one| (one.model.as_str(), one.first_byte, one.idle, one.total)).collect();
        let seconds = Duration::from_secs;
        assert_eq!(
            limits,
            [
                ("org/m:1", Some(TimeLimit::After(seconds(30))), None, Some(seconds(600))),
                ("n", None, Some(Duration::from_millis(500)), None),
                ("o", Some(TimeLimit::Off), None, None),
            ]
        );
    }

    #[test]
    fn everything_wrong_is_said_and_what_would_be_right() {
        let list =
            ["m", "", "m idle", "m idle=x", "m idle=1s idle=2s", "m ttft=1s", "n idle=1s", "n idle=2s"];
        let (all, errors) = parse(&list);
        assert_eq!((all.len(), errors.len()), (1, 7), "{errors:#?}");
        for (error, expected) in errors.iter().zip([
            "no limit",
            "names no model",
            "KEY=TIME",
            "is no time",
            "given twice",
            "only first-byte, idle and total",
            "named twice",
        ]) {
            assert!(error.contains(expected), "{error}");
        }
        assert!(errors[0].contains("write MODEL first-byte=30s"));
    }
}
