//! SVG primitives for the charts of a report.

use std::fmt::Write as _;

/// Width of every drawing, in its own units. It is small, so that text stays legible on a phone.
pub const WIDTH: f64 = 520.0;

/// A drawing under construction.
#[derive(Debug)]
pub struct Svg {
    body: String,
    height: f64,
    label: String,
}

/// Alignment of a text.
#[derive(Clone, Copy, Debug)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// Creates an empty drawing; screen readers announce it as `label`.
    pub fn new(height: f64, label: &str) -> Self {
        Self {
            body: String::new(),
            height,
            label: escaped(label),
        }
    }

    /// Draws a text with its baseline at `y`.
    pub fn text(&mut self, x: f64, y: f64, anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escaped(text);
        self.push(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{text}</text>"
        ));
    }

    /// Draws a straight line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>"
        ));
    }

    /// Draws a rectangle with a tooltip.
    pub fn bar(&mut self, corner: (f64, f64), size: (f64, f64), class: &str, title: &str) {
        let ((x, y), (w, h)) = (corner, (size.0.max(0.0), size.1.max(0.0)));
        let title = escaped(title);
        self.push(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" class=\"{class}\"><title>{title}</title></rect>"
        ));
    }

    /// Draws a line through points, and fills the area down to `base` if given.
    pub fn curve(&mut self, points: &[(f64, f64)], base: Option<f64>, class: &str) {
        let (Some(first), Some(last)) = (points.first(), points.last()) else {
            return;
        };
        let mut path = String::new();
        for (x, y) in points {
            // Writing to a string cannot fail.
            let _ = write!(path, "{x:.1},{y:.1} ");
        }
        if let Some(base) = base {
            let (x1, x2) = (first.0, last.0);
            self.push(format_args!(
                "<polygon points=\"{x1:.1},{base:.1} {path}{x2:.1},{base:.1}\" class=\"{class} area\"/>"
            ));
        }
        let path = path.trim_end();
        self.push(format_args!(
            "<polyline points=\"{path}\" class=\"{class} curve\"/>"
        ));
    }

    /// Returns the drawing as an HTML element.
    pub fn finish(self) -> String {
        let Self {
            body,
            height,
            label,
        } = self;
        format!(
            "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{label}\">\n{body}</svg>\n"
        )
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.body, "{element}");
    }
}

/// Escapes a text for HTML. Control characters are removed.
pub fn escaped(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            c if c.is_control() => html.push(' '),
            c => html.push(c),
        }
    }
    html
}

/// A logarithmic axis of times in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct LogAxis {
    /// Exponents of ten at both ends.
    decades: (i32, i32),
    /// Positions of both ends.
    places: (f64, f64),
}

/// Limits of an axis: a nanosecond, and a day.
const DECADES: (i32, i32) = (-3, 11);

impl LogAxis {
    /// Creates an axis between two positions that includes all `times`.
    pub fn for_times(times: impl IntoIterator<Item = f64>, places: (f64, f64)) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for time in times.into_iter().filter(|time| *time > 0.0) {
            low = low.min(time.log10());
            high = high.max(time.log10());
        }
        if low > high {
            (low, high) = (0.0, 3.0);
        }
        let within = |decade: f64| {
            (DECADES.0..=DECADES.1)
                .find(|candidate| f64::from(*candidate) >= decade)
                .unwrap_or(DECADES.1)
        };
        let (first, last) = (within(low.floor()), within(high.ceil()));
        Self {
            decades: (first, last.max(first + 1)),
            places,
        }
    }

    /// Returns the position of a time, clamped to the ends.
    pub fn place(&self, time_us: f64) -> f64 {
        let (first, last) = (f64::from(self.decades.0), f64::from(self.decades.1));
        let decade = time_us.max(1e-9).log10().clamp(first, last);
        let (left, right) = self.places;
        left + (decade - first) / (last - first) * (right - left)
    }

    /// Iterates over the powers of ten on the axis.
    pub fn ticks(&self) -> impl Iterator<Item = f64> + use<> {
        (self.decades.0..=self.decades.1).map(|decade| 10_f64.powi(decade))
    }

    /// Returns the time at the left end, and the number of steps with `per_decade` steps per
    /// decade.
    pub fn steps(&self, per_decade: usize) -> (f64, usize) {
        let decades = usize::try_from(self.decades.1 - self.decades.0).unwrap_or(1);
        (10_f64.powi(self.decades.0), decades * per_decade)
    }
}

/// Formats a time in a suitable unit: `640 ns`, `16.4 us`, `1.25 ms`.
pub fn time(us: f64) -> String {
    let (value, unit) = match us {
        us if us >= 999_950.0 => (us / 1e6, "s"),
        us if us >= 999.95 => (us / 1e3, "ms"),
        us if us >= 0.999 => (us, "\u{b5}s"),
        us => (us * 1e3, "ns"),
    };
    let text = match value {
        value if value >= 99.95 => format!("{value:.0}"),
        value if value >= 9.995 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    };
    let text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{text} {unit}")
}

/// Formats a count with separated thousands.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// Converts a count to a float: exact up to 2^53.
#[allow(clippy::cast_precision_loss, reason = "a picture has no more digits")]
pub const fn float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_counts_are_short() {
        for (us, text) in [
            (0.0, "0 ns"),
            (0.64, "640 ns"),
            (1.0, "1 \u{b5}s"),
            (16.42, "16.4 \u{b5}s"),
            (999.96, "1 ms"),
            (1250.0, "1.25 ms"),
            (2.0e6, "2 s"),
            (1.0e8, "100 s"),
        ] {
            assert_eq!(time(us), text);
        }
        assert_eq!(count(0), "0");
        assert_eq!(count(1_234_567), "1\u{202f}234\u{202f}567");
    }

    #[test]
    fn an_axis_has_whole_decades_around_what_it_shows() {
        let axis = LogAxis::for_times([12.0, 900.0, 0.0], (0.0, 100.0));
        let ticks: Vec<_> = axis.ticks().collect();
        assert_eq!(ticks, [10.0, 100.0, 1000.0]);
        assert!((axis.place(100.0) - 50.0).abs() < 1e-9);
        assert!((axis.place(-5.0) - 0.0).abs() < 1e-9);
        assert!((axis.place(1e30) - 100.0).abs() < 1e-9);
        for strange in [vec![], vec![1e300], vec![1e-300], vec![f64::INFINITY]] {
            let axis = LogAxis::for_times(strange, (0.0, 1.0));
            assert!(axis.ticks().count() >= 2);
            assert!(axis.place(1.0).is_finite());
        }
    }

    #[test]
    fn what_a_report_says_is_text_and_no_markup() {
        let text = "<script>\"a\" & 'b'</script>\u{7}";
        let safe = "&lt;script&gt;&quot;a&quot; &amp; &#39;b&#39;&lt;/script&gt; ";
        assert_eq!(escaped(text), safe);
        let mut svg = Svg::new(10.0, text);
        svg.text(0.0, 0.0, Anchor::Start, "x", text);
        svg.bar((0.0, 0.0), (1.0, 1.0), "x", text);
        assert!(!svg.finish().contains("<script"));
    }
}
