//! The YAML file: its keys are the flags, so it becomes arguments, and clap's own declaration checks each.

use std::path::Path;

use clap::{CommandFactory, Parser};
use serde_json::{Map, Value};

use super::Cli;

/// Keys that make no sense in a file.
const NOT_IN_A_FILE: &[&str] = &["config", "help", "version"];

/// Reads a file into arguments, `--key=value` each. Keys that are wrong are left out and told in `errors`.
pub(super) fn arguments_of(path: &Path, errors: &mut Vec<String>) -> Vec<String> {
    let mut found = Vec::new();
    let arguments = match std::fs::read_to_string(path) {
        Ok(text) => arguments_of_text(&text, &mut found),
        Err(error) => {
            found.push(format!("cannot be read: {error}"));
            Vec::new()
        }
    };
    errors.extend(found.into_iter().map(|error| format!("{}: {error}", path.display())));
    arguments
}

fn arguments_of_text(text: &str, errors: &mut Vec<String>) -> Vec<String> {
    let keys = match serde_yaml::from_str::<Option<Map<String, Value>>>(text) {
        Ok(keys) => keys.unwrap_or_default(),
        Err(error) => {
            errors.push(format!("no YAML mapping of keys to values: {error}"));
            return Vec::new();
        }
    };
    let known = known_keys();
    let mut arguments = Vec::new();
    for (key, value) in keys {
        let flag = key.replace('_', "-");
        if !known.contains(&flag) {
            errors.push(format!("unknown key {key:?}; there are {}", known.join(", ")));
            continue;
        }
        match text_of(&value) {
            Ok(value) => {
                let argument = format!("--{flag}={value}");
                // One at a time, so that all errors of the file come out at once.
                match Cli::try_parse_from(["router", &argument]) {
                    Ok(_) => arguments.push(argument),
                    Err(error) => errors.push(format!("{key}: {}", reason(&error))),
                }
            }
            Err(wanted) => errors.push(format!("{key}: {wanted}")),
        }
    }
    arguments
}

fn known_keys() -> Vec<String> {
    let command = Cli::command();
    let flags = command.get_arguments().filter_map(|argument| argument.get_long().map(str::to_owned));
    let mut keys: Vec<_> = flags.filter(|flag| !NOT_IN_A_FILE.contains(&flag.as_str())).collect();
    keys.sort_unstable();
    keys
}

fn text_of(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        // YAML reads a bare `on` or `off` as a truth value in some versions.
        Value::Bool(switch) => Ok(if *switch { "on" } else { "off" }.to_owned()),
        Value::Array(items) => Ok(items.iter().map(text_of).collect::<Result<Vec<_>, _>>()?.join(",")),
        Value::Null => Err("has no value".to_owned()),
        Value::Object(_) => Err("must be a single value or a list, not a mapping".to_owned()),
    }
}

/// What clap says, in one line.
pub(super) fn reason(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let told: Vec<_> = lines.filter(|line| !line.is_empty() && !line.starts_with("For more")).collect();
    told.join("; ").trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Vec<String>, Vec<String>) {
        let mut errors = Vec::new();
        (arguments_of_text(text, &mut errors), errors)
    }

    #[test]
    fn keys_are_flags_with_either_hyphen() {
        let (arguments, errors) = read("workers: [a, 'b:9000']\nmax_retries: 5\nroute-headers: off\n");
        assert_eq!(errors, Vec::<String>::new());
        for expected in ["--workers=a,b:9000", "--max-retries=5", "--route-headers=off"] {
            assert!(arguments.contains(&expected.to_owned()), "{arguments:?}");
        }
    }

    #[test]
    fn all_errors_come_at_once_and_name_what_is_valid() {
        let (arguments, errors) =
            read("wrokers: [a]\nport: many\nroute-headers: maybe\npolicy: {a: b}\nhost: 127.0.0.1\n");
        assert_eq!(errors.len(), 4, "{errors:?}");
        for (error, expected) in errors.iter().zip(["workers", "many", "on, off", "single value"]) {
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(arguments, ["--host=127.0.0.1"]);
    }

    #[test]
    fn an_empty_file_is_all_defaults() {
        assert_eq!(read("# nothing\n"), (Vec::new(), Vec::new()));
    }

    #[test]
    fn a_file_that_is_no_mapping_is_an_error() {
        assert_eq!(read("- a\n- b\n").1.len(), 1);
        assert_eq!(read("a: [").1.len(), 1);
    }
}
