//! The fields of a request body, read by type. What is wrong is said with the field's name, its value, and what would be right.

use serde_json::{Map, Value};

use crate::error::RequestError;

/// Characters of a wrong value that a message repeats.
const SHOWN_CHARACTERS: usize = 100;

/// A body.
pub(super) struct Fields(Map<String, Value>);

pub(super) fn wrong(parameter: &'static str, message: String) -> RequestError {
    RequestError::Parameter { parameter, message }
}

/// `value` as messages show it: not all of a long one.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

impl Fields {
    pub(super) fn parse(body: &[u8]) -> Result<Self, RequestError> {
        serde_json::from_slice(body).map(Self).map_err(RequestError::Json)
    }

    /// A field; one that is null counts as absent.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Refuses fields that would change the result and that this worker does not have; `harmless` are values that change nothing.
    pub(super) fn refuse(&self, unsupported: &[(&'static str, &[&str])]) -> Result<(), RequestError> {
        for (name, harmless) in unsupported {
            let Some(value) = self.get(name) else { continue };
            if !harmless.contains(&value.to_string().as_str()) {
                let wanted = if harmless.is_empty() {
                    "leave it out".to_owned()
                } else {
                    format!("leave it out, or set {}", harmless.join(" or "))
                };
                let value = shown(value);
                return Err(wrong(
                    name,
                    format!("{name} = {value} is not supported by this worker; {wanted}"),
                ));
            }
        }
        Ok(())
    }

    pub(super) fn text(&self, name: &'static str) -> Result<Option<String>, RequestError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let text = value.as_str().ok_or_else(|| must(name, "a string", value))?;
        Ok(Some(text.to_owned()))
    }

    pub(super) fn switch(&self, name: &'static str, default: bool) -> Result<bool, RequestError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| must(name, "true or false", value))
    }

    /// A whole number of at least `least`.
    pub(super) fn whole(&self, name: &'static str, least: u64) -> Result<Option<usize>, RequestError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_u64().filter(|number| *number >= least);
        match number.and_then(|number| usize::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(must(name, &format!("a whole number of at least {least}"), value)),
        }
    }

    /// A whole number from `least` to `most`.
    pub(super) fn whole_within(
        &self,
        name: &'static str,
        (least, most): (u64, u64),
    ) -> Result<Option<u64>, RequestError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64().filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(must(name, &format!("a whole number from {least} to {most}"), value)),
        }
    }

    /// A number within `range`.
    pub(super) fn number(
        &self,
        name: &'static str,
        (least, most): (f64, f64),
        default: f32,
    ) -> Result<f32, RequestError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        #[expect(clippy::cast_possible_truncation, reason = "a parameter's 24 bits are enough")]
        match value.as_f64().filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(number as f32),
            None => Err(must(name, &format!("a number from {least} to {most}"), value)),
        }
    }

    /// A list of token ids, at most `most`.
    pub(super) fn tokens(&self, name: &'static str, most: usize) -> Result<Vec<u32>, RequestError> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let tokens = token_ids(value).filter(|tokens| tokens.len() <= most);
        tokens.ok_or_else(|| must(name, &format!("a list of at most {most} token ids"), value))
    }
}

/// A list of whole numbers that can be token ids.
pub(super) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

pub(super) fn must(name: &'static str, wanted: &str, value: &Value) -> RequestError {
    wrong(name, format!("{name} must be {wanted}, not {}", shown(value)))
}
