//! Looks for the fewest workers that are enough: doubles until they are, then halves the gap.
//!
//! Pure: told whether some number was enough, it names the next. [`super`] simulates them.

/// A search under way.
#[derive(Debug, Clone, Copy)]
pub struct Fewest {
    least: usize,
    too_few: usize,
    enough: Option<usize>,
    most: usize,
}

impl Fewest {
    /// A search among `least` to `most` workers that has tried nothing.
    #[must_use]
    pub fn new(least: usize, most: usize) -> Self {
        Self { least, too_few: least - 1, enough: None, most }
    }

    /// The next number to try; `None` at the end.
    #[must_use]
    pub fn next(&self) -> Option<usize> {
        match self.enough {
            Some(enough) if enough == self.too_few + 1 => None,
            Some(enough) => Some(self.too_few.midpoint(enough)),
            None if self.too_few == self.most => None,
            None => Some((self.too_few * 2).clamp(self.least, self.most)),
        }
    }

    /// Takes whether `workers`, which [`Self::next`] has named, were enough.
    pub fn hear(&mut self, workers: usize, enough: bool) {
        if enough {
            self.enough = Some(workers);
        } else {
            self.too_few = workers;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Fewest;

    /// Searches for `needed` among `least` to `most`; what was tried, and what was enough.
    fn search(needed: usize, (least, most): (usize, usize)) -> (Vec<usize>, Option<usize>) {
        let mut search = Fewest::new(least, most);
        let mut tried = Vec::new();
        while let Some(workers) = search.next() {
            assert!(
                (least..=most).contains(&workers) && !tried.contains(&workers),
                "{workers} after {tried:?}"
            );
            tried.push(workers);
            search.hear(workers, workers >= needed);
        }
        (tried, search.enough)
    }

    #[test]
    fn finds_every_number_and_tries_none_twice() {
        for (needed, least) in (1..=100).flat_map(|needed| [(needed, 1), (needed, 2)]) {
            let (tried, found) = search(needed, (least, 100));
            assert_eq!(found, Some(needed.max(least)), "{tried:?}");
            assert!(tried.len() <= 14, "{tried:?}");
        }
    }

    #[test]
    fn ends_where_all_there_may_be_are_too_few() {
        assert_eq!(search(101, (1, 100)), (vec![1, 2, 4, 8, 16, 32, 64, 100], None));
        assert_eq!(search(2, (1, 1)), (vec![1], None));
    }
}
