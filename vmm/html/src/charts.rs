//! The charts of a report.

use super::svg::{Anchor, LogAxis, Svg, WIDTH, count, float, time};
use ssi_hv_api::report::{
    Distribution, FaultCounts, FaultKind, Node, Percentiles, Prefetch, Report, Role, Timeline,
};

/// The plot area; labels are outside of it.
pub const LEFT: f64 = 46.0;
pub const RIGHT: f64 = WIDTH - 26.0;
/// Start of bars without labels at their left.
const EDGE: f64 = 4.0;
/// Steps of a distribution per decade.
const PER_DECADE: usize = 10;

/// A kind of fault: its name, its class, and its field.
type Kind = (
    &'static str,
    &'static str,
    fn(&Report) -> &FaultKind,
    fn(&Report) -> Option<&Distribution>,
    fn(&FaultCounts) -> u64,
);

const KINDS: [Kind; 4] = [
    (
        "remote",
        "remote",
        |r| &r.faults.remote,
        |r| r.distributions.as_ref().map(|d| &d.remote),
        |c| c.remote,
    ),
    (
        "zero",
        "zero",
        |r| &r.faults.zero,
        |r| r.distributions.as_ref().map(|d| &d.zero),
        |c| c.zero,
    ),
    (
        "minor",
        "minor",
        |r| &r.faults.minor,
        |r| r.distributions.as_ref().map(|d| &d.minor),
        |c| c.minor,
    ),
    (
        "first write",
        "write",
        |r| &r.faults.write_protect,
        |r| r.distributions.as_ref().map(|d| &d.write_protect),
        |c| c.write_protect,
    ),
];

/// Iterates over the kinds with faults, with their names.
pub fn kinds(report: &Report) -> impl Iterator<Item = (&'static str, &FaultKind)> {
    let all = KINDS
        .iter()
        .map(|(name, _, kind, ..)| (*name, kind(report)));
    all.filter(|(_, kind)| kind.count > 0)
}

/// Draws a legend: coloured squares with their meanings.
pub fn legend(svg: &mut Svg, (mut x, y): (f64, f64), entries: &[(&str, String)]) {
    for (class, text) in entries {
        svg.bar((x, y - 9.0), (10.0, 10.0), class, text);
        svg.text(x + 14.0, y, Anchor::Start, "label", text);
        // An upper bound of the width of the text.
        let letters = u64::try_from(text.chars().count()).unwrap_or(0);
        x += 30.0 + 7.2 * float(letters);
    }
}

/// Draws the lines and labels of a time axis from `top` to `bottom`.
pub fn time_axis(svg: &mut Svg, axis: &LogAxis, top: f64, bottom: f64) {
    for tick in axis.ticks() {
        let x = axis.place(tick);
        svg.line((x, top), (x, bottom), "grid");
        svg.text(x, bottom + 16.0, Anchor::Middle, "label", &time(tick));
    }
}

/// Draws the distribution of fault latencies for each kind; `None` without data.
pub fn distribution(report: &Report) -> Option<String> {
    report.distributions.as_ref()?;
    let there: Vec<_> = KINDS
        .iter()
        .filter_map(|(name, class, _, distribution, _)| {
            let distribution = distribution(report)?;
            let total: f64 = distribution.iter().map(|(_, n)| float(*n)).sum();
            (total > 0.0).then_some((*name, *class, distribution, total))
        })
        .collect();
    if there.is_empty() {
        return None;
    }
    let times = there
        .iter()
        .flat_map(|(_, _, pairs, _)| pairs.iter().map(|(up_to, _)| *up_to));
    let (top, bottom) = (40.0, 240.0);
    let axis = LogAxis::for_times(times, (LEFT, RIGHT));
    let (start, steps) = axis.steps(PER_DECADE);
    let shares: Vec<Vec<f64>> = there
        .iter()
        .map(|(_, _, pairs, total)| {
            let mut steps = vec![0.0; steps];
            for (up_to, n) in *pairs {
                let at = (up_to / start).log10() * float(PER_DECADE as u64);
                let (share, last) = (float(*n) / *total, steps.len() - 1);
                // A search in the list avoids a cast of an arbitrary float.
                let index = (0..last)
                    .find(|i| float(*i as u64 + 1) >= at)
                    .unwrap_or(last);
                steps[index] += share;
            }
            steps
        })
        .collect();
    let peak = shares.iter().flatten().copied().fold(0.01, f64::max);
    let mut svg = Svg::new(270.0, "Distribution of the latency of faults, by kind");
    let entries = there
        .iter()
        .map(|(name, class, ..)| (*class, (*name).to_owned()));
    legend(&mut svg, (LEFT, 16.0), &entries.collect::<Vec<_>>());
    time_axis(&mut svg, &axis, top, bottom);
    share_axis(&mut svg, peak, top, bottom);
    let per_decade = float(PER_DECADE as u64);
    for ((_, class, ..), steps) in there.iter().zip(&shares).rev() {
        let mut points = Vec::new();
        let mut level = bottom;
        for (at, share) in steps.iter().enumerate() {
            let x = axis.place(start * 10_f64.powf(float(at as u64) / per_decade));
            points.push((x, level));
            level = bottom - share / peak * (bottom - top);
            points.push((x, level));
        }
        points.push((RIGHT, level));
        points.push((RIGHT, bottom));
        svg.curve(&points, Some(bottom), class);
    }
    Some(svg.finish())
}

/// Draws lines for shares up to `peak`, which is at `top`.
fn share_axis(svg: &mut Svg, peak: f64, top: f64, bottom: f64) {
    let step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2]
        .into_iter()
        .find(|step| peak / step <= 5.0)
        .unwrap_or(0.25);
    let mut share = 0.0;
    while share <= peak * 1.0001 {
        let y = bottom - share / peak * (bottom - top);
        svg.line((LEFT, y), (RIGHT, y), "grid");
        let text = format!("{}%", (share * 1000.0).round() / 10.0);
        svg.text(LEFT - 6.0, y + 4.0, Anchor::End, "label", &text);
        share += step;
    }
}

/// Draws the stages of faults: a row for each kind and each stage.
pub fn stages(report: &Report) -> String {
    let remote = &report.faults.remote;
    let mut rows: Vec<(&str, &str, &Percentiles)> = Vec::new();
    for (name, class, kind, ..) in &KINDS {
        let kind = kind(report);
        if kind.count == 0 {
            continue;
        }
        rows.push((name, class, &kind.latency_us));
        if *name == "remote" {
            rows.push(("\u{2013} queue", "stage", &remote.stages.queue));
            rows.push(("\u{2013} fetch", "stage", &remote.stages.fetch));
            rows.push(("\u{2013} install", "stage", &remote.stages.install));
        }
    }
    let (left, top, each) = (84.0, 34.0, 26.0);
    let bottom = top + each * float(rows.len() as u64);
    let times = rows
        .iter()
        .flat_map(|(_, _, p)| [p.p50, p.p90, p.p99, p.p999, p.max]);
    let axis = LogAxis::for_times(times, (left, RIGHT));
    let mut svg = Svg::new(bottom + 28.0, "Percentiles of faults and of their stages");
    let key = "bar: p50 to p90; line: to p99; ticks: p99.9 and the longest";
    svg.text(RIGHT, 16.0, Anchor::End, "label", key);
    time_axis(&mut svg, &axis, top, bottom);
    for (row, (name, class, p)) in rows.iter().enumerate() {
        let middle = top + each * (float(row as u64) + 0.5);
        svg.text(left - 8.0, middle + 4.0, Anchor::End, "label", name);
        let x = |us: f64| axis.place(us);
        svg.line(
            (x(p.p50), middle),
            (x(p.max), middle),
            &format!("{class} thin"),
        );
        svg.line(
            (x(p.p50), middle),
            (x(p.p99), middle),
            &format!("{class} whisker"),
        );
        let title = format!(
            "{name}: p50 {}, p90 {}, p99 {}, p99.9 {}, max {}",
            time(p.p50),
            time(p.p90),
            time(p.p99),
            time(p.p999),
            time(p.max)
        );
        let width = (x(p.p90) - x(p.p50)).max(3.0);
        svg.bar((x(p.p50), middle - 7.0), (width, 14.0), class, &title);
        for us in [p.p999, p.max] {
            let x = x(us);
            svg.line(
                (x, middle - 5.0),
                (x, middle + 5.0),
                &format!("{class} whisker"),
            );
        }
    }
    svg.finish()
}

/// Draws faults per second over time; `None` without data.
pub fn over_time(report: &Report) -> Option<String> {
    let timeline: &Timeline = report.timeline.as_ref()?;
    // A file has any number.
    let interval = timeline.interval_s.clamp(1e-3, 1e9);
    // The last interval may be shorter.
    let samples = match timeline.intervals.split_last() {
        Some((_, whole)) if !whole.is_empty() => whole,
        _ => &timeline.intervals,
    };
    let rate = |n: u64| float(n) / interval;
    let there: Vec<_> = KINDS
        .iter()
        .filter(|(.., of)| samples.iter().any(|counts| of(counts) > 0))
        .collect();
    if there.is_empty() {
        return None;
    }
    let peak = samples
        .iter()
        .flat_map(|counts| there.iter().map(|(.., of)| rate(of(counts))))
        .fold(1.0, f64::max);
    let (top, bottom) = (40.0, 210.0);
    let mut svg = Svg::new(244.0, "Faults a second over time, by kind");
    let entries = there
        .iter()
        .map(|(name, class, ..)| (*class, (*name).to_owned()));
    legend(&mut svg, (LEFT, 16.0), &entries.collect::<Vec<_>>());
    let steps = nice_step(peak / 4.0);
    let mut level = 0.0;
    while level <= peak * 1.0001 {
        let y = bottom - level / peak * (bottom - top);
        svg.line((LEFT, y), (RIGHT, y), "grid");
        svg.text(LEFT - 6.0, y + 4.0, Anchor::End, "label", &short(level));
        level += steps;
    }
    let length = (float(samples.len() as u64) * interval).max(interval);
    let x = |seconds: f64| LEFT + seconds / length * (RIGHT - LEFT);
    let step = nice_step(length / 5.0);
    let mut at = 0.0;
    while at <= length * 1.0001 {
        svg.line((x(at), bottom), (x(at), bottom + 4.0), "axis");
        let text = format!("{} s", (at * 100.0).round() / 100.0);
        svg.text(x(at), bottom + 18.0, Anchor::Middle, "label", &text);
        at += step;
    }
    for (at, (_, class, .., of)) in there.iter().enumerate().rev() {
        let points = samples.iter().enumerate().map(|(i, counts)| {
            let y = bottom - rate(of(counts)) / peak * (bottom - top);
            (x((float(i as u64) + 0.5) * interval), y)
        });
        let points: Vec<_> = points.collect();
        svg.curve(&points, (at == 0).then_some(bottom), class);
    }
    Some(svg.finish())
}

/// Returns a step of 1, 2 or 5 times a power of ten, at least `least`.
fn nice_step(least: f64) -> f64 {
    let decade = 10_f64.powf(least.max(1e-6).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * decade)
        .find(|step| *step >= least)
        .unwrap_or(decade * 10.0)
}

/// Formats a rate in few characters: `1.2k`.
fn short(rate: f64) -> String {
    match rate {
        rate if rate >= 1e6 => format!("{}M", (rate / 1e5).round() / 10.0),
        rate if rate >= 1e3 => format!("{}k", (rate / 1e2).round() / 10.0),
        rate => format!("{}", (rate * 10.0).round() / 10.0),
    }
}

/// Draws the pages fetched from each donor and written back to it.
pub fn nodes(nodes: &[Node]) -> Option<String> {
    let donors: Vec<_> = nodes.iter().filter(|n| n.role == Role::Donor).collect();
    let most = donors
        .iter()
        .map(|node| node.pages_fetched.max(node.pages_written_back))
        .max()?;
    let (top, each) = (30.0, 58.0);
    let height = top + each * float(donors.len() as u64);
    let mut svg = Svg::new(height, "Pages fetched from and written back to each donor");
    let entries = [("remote", "fetched"), ("write", "written back")];
    legend(
        &mut svg,
        (EDGE, 16.0),
        &entries.map(|(class, text)| (class, text.to_owned())),
    );
    let room = RIGHT - EDGE - 76.0;
    for (row, node) in donors.iter().enumerate() {
        let y = top + each * float(row as u64);
        let address = node.address.as_deref().unwrap_or("in this process");
        let name = format!(
            "donor {} \u{b7} {} \u{b7} {} MiB",
            node.id,
            address,
            count(node.memory_bytes >> 20)
        );
        svg.text(EDGE, y + 12.0, Anchor::Start, "label", &name);
        let bars = [
            ("remote", node.pages_fetched),
            ("write", node.pages_written_back),
        ];
        for (at, (class, pages)) in bars.into_iter().enumerate() {
            let y = y + 18.0 + 16.0 * float(at as u64);
            let width = float(pages) / float(most.max(1)) * room;
            svg.bar((EDGE, y), (width.max(1.0), 13.0), class, &count(pages));
            let x = EDGE + width.max(1.0) + 6.0;
            svg.text(x, y + 11.0, Anchor::Start, "label", &count(pages));
        }
    }
    Some(svg.finish())
}

/// Draws the use of prefetched pages; `None` if there were none.
pub fn prefetch(prefetch: &Prefetch) -> Option<String> {
    let issued = prefetch.issued;
    if issued == 0 {
        return None;
    }
    let left = issued
        .saturating_sub(prefetch.used)
        .saturating_sub(prefetch.wasted);
    let parts = [
        ("minor", "used", prefetch.used),
        ("write", "evicted unused", prefetch.wasted),
        ("zero", "unused at the end", left),
    ];
    let mut svg = Svg::new(116.0, "What became of pages that were fetched ahead");
    let whole = float(
        prefetch
            .used
            .saturating_add(prefetch.wasted)
            .saturating_add(left),
    );
    let mut x = EDGE;
    for (at, (class, name, pages)) in parts.into_iter().enumerate() {
        let share = float(pages) / whole.max(1.0);
        let width = share * (RIGHT - EDGE);
        let text = format!("{name}: {} ({:.1} %)", count(pages), share * 100.0);
        svg.bar((x, 6.0), (width, 26.0), class, &text);
        x += width;
        let y = 54.0 + 20.0 * float(at as u64);
        svg.bar((EDGE, y - 9.0), (10.0, 10.0), class, &text);
        svg.text(EDGE + 16.0, y, Anchor::Start, "label", &text);
    }
    let late = format!("touched on the way: {}", count(prefetch.late));
    svg.text(RIGHT, 54.0, Anchor::End, "label", &late);
    Some(svg.finish())
}
