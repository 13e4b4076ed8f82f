//! The 50-column table both originals print: title, sections, `{:<40} {:<10}` lines.

use std::fmt::{Display, Write};

use crate::statistics::CacheReport;

const WIDTH: usize = 50;

/// A table under construction.
#[derive(Debug, Default)]
pub struct Table {
    text: String,
}

impl Table {
    /// Begins with the title line.
    pub fn new(title: &str) -> Self {
        let mut table = Self::default();
        table.line(&format!("{:=^WIDTH$}", format!(" {title} ")));
        table
    }

    /// A section line.
    pub fn section(&mut self, title: &str) {
        self.line(&format!("{title:-^WIDTH$}"));
    }

    /// A line with a whole number or a word.
    pub fn value(&mut self, label: &str, value: impl Display) {
        self.line(&format!("{label:<40} {:<10}", value.to_string()));
    }

    /// A line with two decimals.
    pub fn decimal(&mut self, label: &str, value: f64) {
        self.line(&format!("{label:<40} {value:<10.2}"));
    }

    /// Ends with the closing line.
    pub fn finish(mut self) -> String {
        self.line(&"=".repeat(WIDTH));
        self.text
    }

    /// The section about the prefix cache, when anything is known of it.
    pub fn cache_section(&mut self, cache: &CacheReport) {
        if cache.is_empty() {
            return;
        }
        self.section("Cache Hit Details");
        if let Some(percent) = cache.hit_percent() {
            self.value("Total cached tokens:", cache.cached_tokens);
            self.value("Total prompt tokens (usage):", cache.prompt_tokens);
            self.decimal("Cache hit rate (%):", percent);
        }
        if let Some(tokens) = cache.predicted_hit_tokens {
            self.value("Predicted hit tokens (router):", tokens);
        }
        for (worker, requests) in &cache.requests_by_worker {
            self.value(&format!("Requests on {worker}:"), requests);
        }
    }

    fn line(&mut self, line: &str) {
        writeln!(self.text, "{line}").expect("writing to a string cannot fail");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_the_widths_of_the_originals() {
        let mut table = Table::new("Serving Benchmark Result");
        table.value("Successful requests:", 200);
        table.decimal("Benchmark duration (s):", 0.594);
        table.section("Time per Output Token (excl. 1st token)");
        table.section("Inter-Token Latency");
        // The lines of seed 001.
        let expected = "============ Serving Benchmark Result ============\n\
                        Successful requests:                     200       \n\
                        Benchmark duration (s):                  0.59      \n\
                        -----Time per Output Token (excl. 1st token)------\n\
                        ---------------Inter-Token Latency----------------\n\
                        ==================================================\n";
        assert_eq!(table.finish(), expected);
    }
}
