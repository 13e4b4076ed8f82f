//! The YAML file: its keys are the flags, so it becomes arguments, and clap's own declaration checks each.

use std::path::Path;

use clap::{CommandFactory, Parser};
use serde_json::{Map, Value};

use super::{Cli, ConfigErrors};

/// Keys that make no sense in a file.
const NOT_IN_A_FILE: &[&str] = &["config", "help", "version"];

/// Reads a file into arguments, `--key value` each.
pub(super) fn arguments_of(path: &Path) -> Result<Vec<String>, ConfigErrors> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigErrors(vec![format!("{}: cannot be read: {error}", path.display())]))?;
    arguments_of_text(&text).map_err(|errors| {
        ConfigErrors(errors.into_iter().map(|error| format!("{}: {error}", path.display())).collect())
    })
}

fn arguments_of_text(text: &str) -> Result<Vec<String>, Vec<String>> {
    let keys: Option<Map<String, Value>> = serde_yaml::from_str(text)
        .map_err(|error| vec![format!("no YAML mapping of keys to values: {error}")])?;
    let known = known_keys();
    let mut errors = Vec::new();
    let mut arguments = Vec::new();
    for (key, value) in keys.unwrap_or_default() {
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
    if errors.is_empty() { Ok(arguments) } else { Err(errors) }
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

    #[test]
    fn keys_are_flags_with_either_hyphen() {
        let arguments =
            arguments_of_text("workers: [a, 'b:9000']\nmax_retries: 5\nroute-headers: off\n").unwrap();
        assert!(arguments.contains(&"--workers=a,b:9000".to_owned()));
        assert!(arguments.contains(&"--max-retries=5".to_owned()));
        assert!(arguments.contains(&"--route-headers=off".to_owned()));
    }

    #[test]
    fn all_errors_come_at_once_and_name_what_is_valid() {
        let errors = arguments_of_text("wrokers: [a]\nport: many\nroute-headers: maybe\npolicy: {a: b}\n")
            .unwrap_err();
        assert_eq!(errors.len(), 4, "{errors:?}");
        assert!(errors[0].contains("workers"), "{errors:?}");
        assert!(errors[1].contains("many"), "{errors:?}");
        assert!(errors[2].contains("on, off"), "{errors:?}");
    }

    #[test]
    fn an_empty_file_is_all_defaults() {
        assert_eq!(arguments_of_text("# nothing\n").unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_file_that_is_no_mapping_is_an_error() {
        assert!(arguments_of_text("- a\n- b\n").is_err());
        assert!(arguments_of_text("a: [").is_err());
    }
}
