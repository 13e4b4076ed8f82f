//! JSON and plain text as Python writes them, since chat templates were made for Python.
//!
//! `tojson` in a chat template is `json.dumps`, with a space after `,` and `:` and without HTML escapes; printing a value
//! is `str(value)`. Knows nothing of templates.

use std::fmt::Write as _;

use serde_json::{Number, Value};

/// The arguments of `json.dumps` that chat templates use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct DumpOptions {
    /// Spaces for each level; `None` writes one line.
    pub(crate) indent: Option<usize>,
    /// Escape everything outside ASCII.
    pub(crate) ascii: bool,
    /// Order the keys of objects.
    pub(crate) sort_keys: bool,
}

/// `json.dumps(value)`.
pub(crate) fn dumps(value: &Value, options: DumpOptions) -> String {
    let mut output = String::new();
    JsonWriter { output: &mut output, options }.value(value, 1);
    output
}

struct JsonWriter<'output> {
    output: &'output mut String,
    options: DumpOptions,
}

impl JsonWriter<'_> {
    fn value(&mut self, value: &Value, depth: usize) {
        match value {
            Value::Null => self.output.push_str("null"),
            Value::Bool(flag) => self.output.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => self.output.push_str(&number_text(number)),
            Value::String(text) => self.string(text),
            Value::Array(items) if items.is_empty() => self.output.push_str("[]"),
            Value::Array(items) => {
                self.output.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.separate(index, depth);
                    self.value(item, depth + 1);
                }
                self.close(']', depth);
            }
            Value::Object(entries) if entries.is_empty() => self.output.push_str("{}"),
            Value::Object(entries) => {
                let mut entries: Vec<_> = entries.iter().collect();
                if self.options.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.output.push('{');
                for (index, (key, item)) in entries.into_iter().enumerate() {
                    self.separate(index, depth);
                    self.string(key);
                    self.output.push_str(": ");
                    self.value(item, depth + 1);
                }
                self.close('}', depth);
            }
        }
    }

    fn separate(&mut self, index: usize, depth: usize) {
        match (index, self.options.indent) {
            (0, None) => {}
            (_, None) => self.output.push_str(", "),
            (0, Some(_)) => self.new_line(depth),
            (_, Some(_)) => {
                self.output.push(',');
                self.new_line(depth);
            }
        }
    }

    fn close(&mut self, bracket: char, depth: usize) {
        self.new_line(depth - 1);
        self.output.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.options.indent {
            self.output.push('\n');
            self.output.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.output.push('"');
        for character in text.chars() {
            match character {
                '"' => self.output.push_str("\\\""),
                '\\' => self.output.push_str("\\\\"),
                '\n' => self.output.push_str("\\n"),
                '\r' => self.output.push_str("\\r"),
                '\t' => self.output.push_str("\\t"),
                '\u{8}' => self.output.push_str("\\b"),
                '\u{c}' => self.output.push_str("\\f"),
                control if u32::from(control) < 0x20 => self.escape_unit(u32::from(control) as u16),
                other if self.options.ascii && !(' '..='~').contains(&other) => {
                    let mut units = [0u16; 2];
                    for unit in other.encode_utf16(&mut units) {
                        self.escape_unit(*unit);
                    }
                }
                other => self.output.push(other),
            }
        }
        self.output.push('"');
    }

    fn escape_unit(&mut self, unit: u16) {
        write!(self.output, "\\u{unit:04x}").expect("writing to a String cannot fail");
    }
}

/// Integers as they are; floats as Python's `repr`: the exponent has a sign and at least two digits.
fn number_text(number: &Number) -> String {
    let Some(float) = number.as_f64().filter(|_| number.is_f64()) else { return number.to_string() };
    let magnitude = float.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{float:e}");
        let (digits, exponent) = text.split_once('e').expect("{:e} writes an exponent");
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{float:?}")
}

/// `str(value)` for what is not a string, and `repr` for what stands inside a list or dictionary.
pub(crate) fn python_repr(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(flag) => if *flag { "True" } else { "False" }.to_owned(),
        Value::Number(number) => number_text(number),
        Value::String(text) => quoted(text),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(python_repr).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(entries) => {
            let entries = entries.iter().map(|(key, item)| format!("{}: {}", quoted(key), python_repr(item)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
    }
}

/// Python prefers single quotes, and takes double ones when only that saves escapes.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut output = String::from(quote);
    for character in text.chars() {
        match character {
            '\\' => output.push_str("\\\\"),
            '\n' => output.push_str("\\n"),
            '\r' => output.push_str("\\r"),
            '\t' => output.push_str("\\t"),
            same if same == quote => output.extend(['\\', same]),
            control if control.is_control() && u32::from(control) < 0x100 => {
                write!(output, "\\x{:02x}", u32::from(control)).expect("writing to a String cannot fail");
            }
            other => output.push(other),
        }
    }
    output.push(quote);
    output
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn writes_like_json_dumps() {
        let value = json!({"b": [1, 2.5, true, null], "a": "<b> é \"q\"\n", "e": {}, "l": []});
        assert_eq!(
            dumps(&value, DumpOptions::default()),
            r#"{"b": [1, 2.5, true, null], "a": "<b> é \"q\"\n", "e": {}, "l": []}"#
        );
    }

    #[test]
    fn honours_indent_ascii_and_sort_keys() {
        let value = json!({"b": [1, {"c": "é😀"}], "a": {}});
        let options = DumpOptions { indent: Some(2), ascii: true, sort_keys: true };
        let expected = "{\n  \"a\": {},\n  \"b\": [\n    1,\n    {\n      \"c\": \"\\u00e9\\ud83d\\ude00\"\n    }\n  ]\n}";
        assert_eq!(dumps(&value, options), expected);
    }

    #[test]
    fn writes_floats_like_python() {
        for (float, text) in [(1.0, "1.0"), (1e16, "1e+16"), (5e-5, "5e-05"), (1e-4, "0.0001"), (0.0, "0.0")]
        {
            assert_eq!(dumps(&json!(float), DumpOptions::default()), text);
        }
    }

    #[test]
    fn prints_values_like_python() {
        let value = json!([null, true, "it's", {"k": "a\"b'\n"}]);
        assert_eq!(python_repr(&value), r#"[None, True, "it's", {'k': 'a"b\'\n'}]"#);
    }
}
