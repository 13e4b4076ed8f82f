//! What an engine says of itself in Prometheus' text format: the samples of a few names, without a parser of all of it. Used by
//! [`cache_size`](crate::cache_size) and [`engine_load`](crate::engine_load).

/// One line that is a sample.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The metric's name.
    pub name: &'a str,
    labels: &'a str,
    value: &'a str,
}

impl<'a> Sample<'a> {
    /// The value of a label; of these names and values none has quotes in it.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        while let Some((key, after)) = rest.split_once("=\"") {
            let (value, next) = after.split_once('"')?;
            if key.trim_start_matches([',', ' ']) == name {
                return Some(value);
            }
            rest = next;
        }
        None
    }

    /// Its value, if that is a number from 0 to 10^15; a time may stand behind it.
    #[must_use]
    pub fn number(&self) -> Option<f64> {
        let number: f64 = self.value.split_whitespace().next()?.parse().ok()?;
        (0.0..1e15).contains(&number).then_some(number)
    }
}

/// The samples in `text`, with labels or without.
pub fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| match line.split_once('{') {
        Some((name, rest)) => {
            let (labels, value) = rest.rsplit_once('}')?;
            Some(Sample { name, labels, value })
        }
        None => {
            let (name, value) = line.split_once(' ')?;
            Some(Sample { name, labels: "", value })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_samples_and_passes_over_everything_else() {
        let text = "# HELP a b\na{x=\"1\",y=\"{2}\"} 3 1700000000\n\na\nb 1e3\nc{\nd{x=\"1} NaN\ne -1\n";
        let read: Vec<_> = samples(text)
            .map(|sample| (sample.name, sample.label("y"), sample.label("x"), sample.number()))
            .collect();
        let expected = [
            ("a", Some("{2}"), Some("1"), Some(3.0)),
            ("b", None, None, Some(1_000.0)),
            ("d", None, None, None),
            ("e", None, None, None),
        ];
        assert_eq!(read, expected);
    }
}
