//! Line charts as one SVG file that any browser shows: no script, no font, nothing to fetch.
//!
//! Pure: values in, text out. Knows nothing of benchmarks; [`crate::sweep`] and [`crate::knee`] fill it.

use std::fmt::Write;

/// Size of one chart with its labels, in pixels.
const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 340.0;
/// Space around the area that is drawn in.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Height of a line of the legend under all charts.
const LEGEND: f64 = 24.0;
/// Okabe and Ito's colours, which colour-blind people can tell apart, and grey.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"];
/// How lines are drawn that have the colours once more.
const DASHES: [&str; 3] = ["", "7 4", "2 3"];
/// About how many marks a linear axis has.
const MARKS: f64 = 5.0;

/// How values become lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Equal steps are equal lengths; begins at 0.
    Linear,
    /// The same, of a part that need not begin at 0.
    Part,
    /// Equal factors are equal lengths; values of 0 and less are left out.
    Log,
}

/// One axis.
#[derive(Debug, Clone)]
pub struct Axis {
    /// What and in which unit.
    pub label: String,
    /// How values become lengths.
    pub scale: Scale,
}

/// One line.
#[derive(Debug, Clone)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Points from left to right.
    pub points: Vec<(f64, f64)>,
}

/// One chart.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Below it.
    pub x: Axis,
    /// Beside it.
    pub y: Axis,
    /// Its lines; lines of the same position look the same in all charts.
    pub series: Vec<Series>,
}

/// The charts side by side with one legend, that of the first chart.
pub fn svg(charts: &[Chart]) -> String {
    let width = WIDTH * charts.len().max(1) as f64;
    let mut legends = String::new();
    let lines = charts.first().map_or(1, |first| legend(&mut legends, &first.series, width));
    let height = HEIGHT + LEGEND * lines as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (index, chart) in charts.iter().enumerate() {
        writeln!(out, "<g transform=\"translate({} 0)\">", WIDTH * index as f64).expect(NEVER_FAILS);
        chart.draw(&mut out);
        out.push_str("</g>\n");
    }
    out.push_str(&legends);
    out.push_str("</svg>\n");
    out
}

const NEVER_FAILS: &str = "writing to a string cannot fail";

/// A line of text; `more` are further attributes.
fn text(out: &mut String, (x, y): (f64, f64), more: &str, words: &str) {
    writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" {more}>{}</text>", escape(words)).expect(NEVER_FAILS);
}

/// In lines of that `width`; returns how many there are.
fn legend(out: &mut String, series: &[Series], width: f64) -> usize {
    let (mut x, mut lines) = (LEFT, 1);
    for (index, series) in series.iter().enumerate() {
        let takes = 50.0 + 7.0 * series.name.chars().count() as f64;
        if x > LEFT && x + takes > width {
            (x, lines) = (LEFT, lines + 1);
        }
        let y = HEIGHT + LEGEND * (lines as f64 - 0.5);
        let middle = y - 4.0;
        writeln!(
            out,
            "<polyline points=\"{x:.1},{middle:.1} {:.1},{middle:.1}\" {}/>",
            x + 20.0,
            stroke(index)
        )
        .expect(NEVER_FAILS);
        text(out, (x + 26.0, y), "", &series.name);
        x += takes;
    }
    lines
}

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

/// How the line of that position is drawn.
fn stroke(index: usize) -> String {
    let dashes = DASHES[index / COLOURS.len() % DASHES.len()];
    let dashes = if dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dashes}\"") };
    format!("fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{dashes}", colour(index))
}

impl Chart {
    fn draw(&self, out: &mut String) {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Range::of(self.x.scale, points().map(|point| point.0), (LEFT, WIDTH - RIGHT));
        let y = Range::of(self.y.scale, points().map(|point| point.1), (HEIGHT - BOTTOM, TOP));
        text(out, (WIDTH / 2.0, TOP / 2.0), "text-anchor=\"middle\" font-weight=\"bold\"", &self.title);
        text(out, (WIDTH / 2.0, HEIGHT - 12.0), "text-anchor=\"middle\"", &self.x.label);
        let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 14 {:.1})\"", HEIGHT / 2.0);
        text(out, (14.0, HEIGHT / 2.0), &turned, &self.y.label);
        for mark in x.marks() {
            let at = x.place(mark);
            line(out, (at, TOP), (at, HEIGHT - BOTTOM));
            text(out, (at, HEIGHT - BOTTOM + 16.0), "text-anchor=\"middle\"", &number(mark));
        }
        for mark in y.marks() {
            let at = y.place(mark);
            line(out, (LEFT, at), (WIDTH - RIGHT, at));
            text(out, (LEFT - 6.0, at + 4.0), "text-anchor=\"end\"", &number(mark));
        }
        for (index, series) in self.series.iter().enumerate() {
            self.draw_series(out, series, index, (&x, &y));
        }
    }

    fn draw_series(&self, out: &mut String, series: &Series, index: usize, (x, y): (&Range, &Range)) {
        let drawable = |(at_x, at_y): &&(f64, f64)| self.x.scale.shows(*at_x) && self.y.scale.shows(*at_y);
        let places: Vec<_> = series
            .points
            .iter()
            .filter(drawable)
            .map(|(at_x, at_y)| (x.place(*at_x), y.place(*at_y)))
            .collect();
        let path: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        writeln!(out, "<polyline points=\"{}\" {}/>", path.join(" "), stroke(index)).expect(NEVER_FAILS);
        let colour = colour(index);
        for (x, y) in places {
            writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>")
                .expect(NEVER_FAILS);
        }
    }
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64)) {
    let ((x1, y1), (x2, y2)) = (from, to);
    writeln!(out, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#ddd\"/>")
        .expect(NEVER_FAILS);
}

impl Scale {
    fn shows(self, value: f64) -> bool {
        value.is_finite() && (self != Self::Log || value > 0.0)
    }

    fn length(self, value: f64) -> f64 {
        match self {
            Self::Linear | Self::Part => value,
            Self::Log => value.ln(),
        }
    }
}

/// The values of an axis and where they lie.
struct Range {
    scale: Scale,
    low: f64,
    high: f64,
    places: (f64, f64),
}

impl Range {
    fn of(scale: Scale, values: impl Iterator<Item = f64>, places: (f64, f64)) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| scale.shows(*value)) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (1.0, 10.0); // nothing to show
        }
        match scale {
            Scale::Linear => (low, high) = (low.min(0.0), if high > 0.0 { high * 1.05 } else { 1.0 }),
            Scale::Part => {
                let margin = if high > low { (high - low) * 0.05 } else { high.abs().max(1.0) * 0.05 };
                (low, high) = (low - margin, high + margin);
            }
            Scale::Log if high / low < 2.0 => (low, high) = (low / 1.5, high * 1.5),
            Scale::Log => (low, high) = (low / 1.1, high * 1.1),
        }
        Self { scale, low, high, places }
    }

    fn place(&self, value: f64) -> f64 {
        let length = |value| self.scale.length(value);
        let share = (length(value) - length(self.low)) / (length(self.high) - length(self.low));
        self.places.0 + share * (self.places.1 - self.places.0)
    }

    /// Round values within the range.
    fn marks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear | Scale::Part => {
                let step = round_up((self.high - self.low) / MARKS);
                let first = (self.low / step).ceil() as i64;
                (first..).map(|n| n as f64 * step).take_while(|mark| *mark <= self.high).collect()
            }
            Scale::Log => self.log_marks(),
        }
    }

    /// Powers of ten over several decades; of two within a few.
    fn log_marks(&self) -> Vec<f64> {
        let base: f64 = if self.high / self.low > 1e4 { 10.0 } else { 2.0 };
        let first = (self.low.ln() / base.ln()).ceil() as i32;
        (first..).map(|power| base.powi(power)).take_while(|mark| *mark <= self.high).collect()
    }
}

/// The next of 1, 2, 5, 10, … times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let digit = [1.0, 2.0, 5.0, 10.0].into_iter().find(|digit| digit * power >= value * 0.999);
    digit.unwrap_or(10.0) * power
}

/// Short, with k and M.
fn number(value: f64) -> String {
    let (value, unit) = match value.abs() {
        large if large >= 1e6 => (value / 1e6, "M"),
        large if large >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = format!("{value:.3}");
    format!("{}{unit}", digits.trim_end_matches('0').trim_end_matches('.'))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: Scale, points: &[(f64, f64)]) -> Chart {
        let axis = |label: &str, scale| Axis { label: label.to_owned(), scale };
        let series = vec![Series { name: "a < b".to_owned(), points: points.to_vec() }];
        Chart { title: "t".to_owned(), x: axis("x", Scale::Log), y: axis("y", scale), series }
    }

    #[test]
    fn points_lie_between_the_axes_and_in_order() {
        let y = Range::of(Scale::Linear, [0.0, 50.0, 100.0].into_iter(), (300.0, 0.0));
        assert!(y.place(0.0) > y.place(50.0) && y.place(50.0) > y.place(100.0));
        assert!((0.0..=300.0).contains(&y.place(100.0)));
        let x = Range::of(Scale::Log, [1.0, 2.0, 4.0].into_iter(), (0.0, 100.0));
        let gaps = (x.place(2.0) - x.place(1.0), x.place(4.0) - x.place(2.0));
        assert!((gaps.0 - gaps.1).abs() < 1e-9, "equal factors are equal lengths");
    }

    #[test]
    fn marks_are_round_and_within_the_axis() {
        let marks = |scale, values: &[f64]| Range::of(scale, values.iter().copied(), (0.0, 1.0)).marks();
        assert_eq!(marks(Scale::Linear, &[95.0]), [0.0, 20.0, 40.0, 60.0, 80.0]);
        let part = marks(Scale::Part, &[0.7, 0.9, 1.0]);
        assert!(part.len() >= 3 && part[0] >= 0.65 && part.is_sorted(), "{part:?}");
        assert!(!marks(Scale::Part, &[0.9]).is_empty());
        assert_eq!(marks(Scale::Log, &[1.0, 16.0]), [1.0, 2.0, 4.0, 8.0, 16.0]);
        assert_eq!(marks(Scale::Log, &[1.0, 1e6]).len(), 7);
    }

    #[test]
    fn lines_beyond_the_colours_are_told_apart_and_all_are_in_the_legend() {
        let series: Vec<_> = (0..17)
            .map(|number| Series { name: format!("policy number {number}"), points: vec![(1.0, 2.0)] })
            .collect();
        let strokes: std::collections::HashSet<_> = (0..series.len()).map(stroke).collect();
        assert_eq!(strokes.len(), 17);
        let mut legends = String::new();
        assert!(legend(&mut legends, &series, 600.0) > 3);
        assert_eq!(legends.matches("policy number").count(), 17);
    }

    #[test]
    fn a_file_has_every_point_and_no_markup_of_names() {
        let file = svg(&[
            chart(Scale::Linear, &[(1.0, 2.0), (2.0, 3.0)]),
            chart(Scale::Log, &[(1.0, 0.0), (2.0, 3.0)]),
        ]);
        assert_eq!(file.matches("<circle").count(), 3, "a value of 0 has no place on a logarithmic axis");
        assert!(file.contains("a &lt; b") && file.ends_with("</svg>\n"));
        assert_eq!(svg(&[chart(Scale::Log, &[])]).matches("<circle").count(), 0);
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.25, 5.0, 12_000.0, 2.5e6].map(number), ["0.25", "5", "12k", "2.5M"]);
    }
}
