//! Finds stop strings in text that arrives in pieces.
//!
//! The result does not depend on how the text is cut: the match whose end comes first wins, and among those the longest.

/// Holds back text that may be the beginning of a stop string.
#[derive(Debug, Default)]
pub(crate) struct StopStrings {
    stops: Vec<String>,
    held: String,
}

/// What became of a piece of text.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Released {
    /// Text that no stop string can claim any more.
    pub(crate) text: String,
    /// A stop string was met right after `text`.
    pub(crate) stopped: bool,
}

impl StopStrings {
    /// Empty strings are ignored: they would stop everything.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new() }
    }

    pub(crate) fn push(&mut self, text: &str) -> Released {
        self.held.push_str(text);
        if let Some(start) = self.first_match() {
            self.held.truncate(start);
            return Released { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep_from = self.held.len() - self.longest_open_prefix();
        let rest = self.held.split_off(keep_from);
        Released { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text held back, which nothing can complete any more.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn first_match(&self) -> Option<usize> {
        let matches = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        matches.min().map(|(_, start)| start)
    }

    /// Bytes at the end of the held text that begin some stop string.
    fn longest_open_prefix(&self) -> usize {
        let open = |stop: &String| {
            let longest = self.held.len().min(stop.len() - 1);
            let mut lengths = (1..=longest).rev();
            lengths.find(|&length| self.held.as_bytes().ends_with(&stop.as_bytes()[..length])).unwrap_or(0)
        };
        self.stops.iter().map(open).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn feed(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopStrings::new(stops.iter().map(|&stop| stop.to_owned()).collect());
        let mut output = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            output.push_str(&released.text);
            if released.stopped {
                return (output, true);
            }
        }
        output.push_str(&matcher.finish());
        (output, false)
    }

    #[test]
    fn holds_back_what_may_begin_a_stop() {
        let mut matcher = StopStrings::new(vec!["\n\nUser:".into()]);
        assert_eq!(matcher.push("Hello\n"), Released { text: "Hello".into(), stopped: false });
        assert_eq!(matcher.push("\nUs"), Released { text: String::new(), stopped: false });
        assert_eq!(matcher.push("ually"), Released { text: "\n\nUsually".into(), stopped: false });
    }

    #[test]
    fn cuts_at_the_match_that_ends_first() {
        assert_eq!(feed(&["abcde", "bc"], &["abcde"]), ("a".into(), true));
        assert_eq!(feed(&["abcde", "bc"], &["a", "b", "c", "d", "e"]), ("a".into(), true));
    }

    #[test]
    fn releases_everything_at_the_end() {
        assert_eq!(feed(&["STOP"], &["a ST", "O"]), ("a STO".into(), false));
    }

    #[test]
    fn multi_byte_text_is_cut_between_characters() {
        // "é" and "è" share their first byte, which must not tempt the matcher into cutting a character.
        assert_eq!(feed(&["è"], &["caf", "é", "s"]), ("cafés".into(), false));
        assert_eq!(feed(&["è"], &["caf", "è", "s"]), ("caf".into(), true));
    }

    proptest! {
        #[test]
        fn agrees_with_a_search_of_the_whole_text(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            text in "[abcé]{0,30}",
            cuts in prop::collection::vec(0usize..30, 0..10),
        ) {
            let expected = stops.iter()
                .filter_map(|stop| text.find(stop.as_str()).map(|start| (start + stop.len(), start)))
                .min()
                .map_or((text.clone(), false), |(_, start)| (text[..start].to_owned(), true));
            let mut bounds: Vec<usize> = cuts.into_iter().filter(|&cut| text.is_char_boundary(cut)).collect();
            bounds.extend([0, text.len()]);
            bounds.sort_unstable();
            let pieces: Vec<&str> = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(feed(&stops, &pieces), expected);
        }
    }
}
