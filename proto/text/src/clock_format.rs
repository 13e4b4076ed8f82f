//! `strftime` for chat templates, in UTC: the few directives that templates use.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The present moment by `format`.
pub(crate) fn now(format: &str) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    at(format, since.as_secs())
}

/// A moment, in seconds since 1970, by `format`. Directives that are not known stay as they are.
fn at(format: &str, seconds: u64) -> String {
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        match letters.next() {
            Some('Y') => text += &year.to_string(),
            Some('m') => text += &format!("{month:02}"),
            Some('d') => text += &format!("{day:02}"),
            Some('B') => text += month_name,
            Some('b') => text += &month_name[..3],
            Some('A') => text += day_name,
            Some('a') => text += &day_name[..3],
            Some('H') => text += &format!("{:02}", second_of_day / 3_600),
            Some('M') => text += &format!("{:02}", second_of_day / 60 % 60),
            Some('S') => text += &format!("{:02}", second_of_day % 60),
            Some('%') => text.push('%'),
            Some(other) => text.extend(['%', other]),
            None => text.push('%'),
        }
    }
    text
}

/// Year, month and day of a day since 1970. From Howard Hinnant's "chrono-compatible low-level date algorithms".
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day_of_year - (153 * shifted + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(at("%d %b %Y", 0), "01 Jan 1970");
        assert_eq!(at("%A, %B %d, %Y %H:%M:%S", 951_782_399), "Monday, February 28, 2000 23:59:59");
        assert_eq!(at("%a %Y-%m-%d", 951_782_400), "Tue 2000-02-29");
        assert_eq!(at("100%% %q %", 1_763_683_200), "100% %q %");
        assert_eq!(at("%Y-%m-%d", 1_763_683_200), "2025-11-21");
    }
}
