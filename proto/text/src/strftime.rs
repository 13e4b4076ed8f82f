//! Dates in chat templates: the part of C's `strftime` that they use, in UTC.

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

struct Moment {
    year: i64,
    month: usize,
    day: i64,
    weekday: usize,
    day_of_year: i64,
    second_of_day: i64,
}

/// Formats seconds since 1970; an unknown directive is left as it stands.
pub(crate) fn strftime(format: &str, unix_seconds: i64) -> String {
    let moment = Moment::at(unix_seconds);
    let mut output = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            output.push(character);
            continue;
        }
        // `%-d` is `%d` without the padding.
        match characters.next() {
            Some('-') => {
                let padded =
                    characters.next().map_or_else(|| "%-".to_owned(), |letter| moment.directive(letter));
                let bare = padded.trim_start_matches('0');
                output.push_str(if bare.is_empty() { "0" } else { bare });
            }
            Some(letter) => output.push_str(&moment.directive(letter)),
            None => output.push('%'),
        }
    }
    output
}

impl Moment {
    /// Civil date from a day count: Howard Hinnant's `civil_from_days`.
    fn at(unix_seconds: i64) -> Self {
        let days = unix_seconds.div_euclid(86_400);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        // `day_from_march` counts from 1 March, which is day 60 of a year and 61 of a leap year.
        let day_of_year =
            if month > 2 { day_from_march + 60 + i64::from(leap) } else { day_from_march - 305 };
        Self {
            year,
            month: usize::try_from(month).expect("a month is 1 to 12"),
            day,
            weekday: usize::try_from((days + 4).rem_euclid(7)).expect("a remainder of 7"),
            day_of_year,
            second_of_day: unix_seconds.rem_euclid(86_400),
        }
    }

    fn directive(&self, letter: char) -> String {
        let (hour, minute, second) =
            (self.second_of_day / 3_600, self.second_of_day / 60 % 60, self.second_of_day % 60);
        let (month_name, day_name) = (MONTHS[self.month - 1], DAYS[self.weekday]);
        match letter {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:>2}", self.day),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => day_name.to_owned(),
            'a' => day_name[..3].to_owned(),
            'j' => format!("{:03}", self.day_of_year),
            'u' => if self.weekday == 0 { 7 } else { self.weekday }.to_string(),
            'w' => self.weekday.to_string(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'z' => "+0000".to_owned(),
            'Z' => "UTC".to_owned(),
            '%' => "%".to_owned(),
            other => format!("%{other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_the_directives_that_templates_use() {
        // 2024-07-26 09:05:03 UTC, a Friday.
        let at = 1_721_984_703;
        assert_eq!(strftime("%d %b %Y", at), "26 Jul 2024");
        assert_eq!(strftime("%A, %-d %B %y %I:%M:%S %p 100%%", at), "Friday, 26 July 24 09:05:03 AM 100%");
        assert_eq!(strftime("%Y-%m-%dT%H", at), strftime("%FT%H", at));
    }

    #[test]
    fn knows_leap_years_and_the_ends_of_years() {
        assert_eq!(strftime("%F %j %a", 951_782_400), "2000-02-29 060 Tue");
        assert_eq!(strftime("%F %j", 978_220_800), "2000-12-31 366");
        assert_eq!(strftime("%F %j %u", 0), "1970-01-01 001 4");
        assert_eq!(strftime("%F %j", 1_709_251_200), "2024-03-01 061");
        assert_eq!(strftime("%F", -1), "1969-12-31");
    }
}
