//! The page of `ssi-hv bench transport --json`: what each transport takes and carries, side by side.

use std::fmt::Write as _;

use ssi_hv_api::bench::{OfSize, Transport, TransportBench};
use ssi_hv_api::report::{Percentiles, Virtualization};
use ssi_hv_api::size::ByteSize;

use super::charts::{LEFT, RIGHT, legend, time_axis};
use super::svg::{Anchor, LogAxis, Svg, count, escaped, float, time};
use super::{foot, head, note, section};

/// Size of a page, bytes.
const PAGE_BYTES: u32 = 4096;
/// Top and bottom of the plot area of most charts.
const TOP: f64 = 40.0;
const BOTTOM: f64 = 240.0;

/// Renders the page of a comparison of transports.
#[must_use]
pub fn render(bench: &TransportBench) -> String {
    let mut page = head("SSI-HV: transports compared");
    header(&mut page, bench);
    tiles(&mut page, bench);
    let none = || note("Nothing was measured.");
    page.push_str("<main>\n");
    section(
        &mut page,
        "Round trips of a page",
        "Share of the round trips of 4 KiB that took up to a time, on a logarithmic axis.",
        shares(bench).unwrap_or_else(none),
    );
    section(
        &mut page,
        "Percentiles of a page",
        "Pages read, and below them pages written, one at a time.",
        percentiles(bench).unwrap_or_else(none),
    );
    section(
        &mut page,
        "Throughput by size",
        "Bytes a second of a stream of requests, by their size; both axes are logarithmic.",
        by_size(bench, "Throughput by size", rate, |of_size| {
            of_size.stream_bytes_per_second / f64::from(1 << 20)
        })
        .unwrap_or_else(none),
    );
    section(
        &mut page,
        "Median round trip by size",
        "One request at a time; both axes are logarithmic.",
        by_size(bench, "Median round trip by size", time, |of_size| {
            of_size.trips.latency_us.p50
        })
        .unwrap_or_else(none),
    );
    section(
        &mut page,
        "CPU time by page",
        match bench.donor {
            Some(_) => {
                "CPU time of the measuring process for 4 KiB of a stream, by size of its requests."
            }
            None => {
                "CPU time of both ends for 4 KiB of a stream, by size of its requests; the donor was \
                 in the same process."
            }
        },
        by_size(bench, "CPU time by page", time, |of_size| {
            of_size.cpu_us_per_page
        })
        .unwrap_or_else(none),
    );
    page.push_str("</main>\n");
    table(&mut page, bench);
    skipped(&mut page, bench);
    foot(&mut page, bench.schema);
    page
}

/// Returns the class of a transport, which gives it its colour.
fn class(kind: &str) -> &'static str {
    match kind {
        "rdma" => "remote",
        "tcp" => "minor",
        "udp" => "write",
        _ => "zero",
    }
}

fn of_pages(transport: &Transport) -> Option<&OfSize> {
    let mut sizes = transport.sizes.iter();
    sizes.find(|of_size| of_size.bytes == PAGE_BYTES)
}

/// Formats a rate in MiB/s.
fn rate(mib: f64) -> String {
    match mib {
        mib if mib >= 1024.0 => format!("{:.1} GiB/s", mib / 1024.0),
        mib if mib >= 9.95 => format!("{mib:.0} MiB/s"),
        mib => format!("{mib:.2} MiB/s"),
    }
}

fn header(page: &mut String, bench: &TransportBench) {
    let wrong = match bench.corrupt_bytes {
        0 => (
            "good",
            format!("{} bytes right", count(bench.verified_bytes)),
        ),
        wrong => ("bad", format!("{} bytes wrong", count(wrong))),
    };
    let donor = bench.donor.as_deref().unwrap_or("in the same process");
    let _ = write!(
        page,
        "<header>\n<h1>Transports compared <span class=\"badge {}\">{}</span></h1>\n\
         <p>donor {}</p>\n<p>on {}, Linux {}</p>\n",
        wrong.0,
        wrong.1,
        escaped(donor),
        escaped(&bench.host.cpu_model),
        escaped(&bench.host.kernel),
    );
    if bench.host.virtualization == Virtualization::Emulated {
        page.push_str(
            "<p class=\"warning\">This host has no hardware virtualization; if it is emulated, its \
             times are not representative, only their ratios.</p>\n",
        );
    }
    page.push_str("</header>\n");
}

fn tiles(page: &mut String, bench: &TransportBench) {
    page.push_str("<dl class=\"tiles\">\n");
    for transport in &bench.transports {
        let of_pages = of_pages(transport);
        let median = of_pages.map_or_else(
            || "\u{2013}".to_owned(),
            |pages| time(pages.trips.latency_us.p50),
        );
        let _ = writeln!(
            page,
            "<div><dt>{}, a page</dt><dd>{median}</dd></div>",
            escaped(&transport.kind)
        );
    }
    page.push_str("</dl>\n");
}

fn entries(bench: &TransportBench) -> Vec<(&'static str, String)> {
    let all = bench.transports.iter();
    all.map(|one| (class(&one.kind), one.kind.clone()))
        .collect()
}

/// Draws the distribution functions of a page's round trips; `None` without data.
fn shares(bench: &TransportBench) -> Option<String> {
    let there = || {
        let all = bench.transports.iter();
        all.filter(|one| one.page_distribution.iter().any(|(_, n)| *n > 0))
    };
    there().next()?;
    let times = there().flat_map(|one| one.page_distribution.iter().map(|(us, _)| *us));
    let axis = LogAxis::for_times(times, (LEFT, RIGHT));
    let mut svg = Svg::new(270.0, "Shares of the round trips of a page up to a time");
    legend(&mut svg, (LEFT, 16.0), &entries(bench));
    time_axis(&mut svg, &axis, TOP, BOTTOM);
    for percent in [0, 25, 50, 75, 100_u8] {
        let y = BOTTOM - f64::from(percent) / 100.0 * (BOTTOM - TOP);
        svg.line((LEFT, y), (RIGHT, y), "grid");
        let text = format!("{percent}%");
        svg.text(LEFT - 6.0, y + 4.0, Anchor::End, "label", &text);
    }
    for one in there() {
        let pairs = &one.page_distribution;
        let total: f64 = pairs.iter().map(|(_, n)| float(*n)).sum();
        let mut points = Vec::new();
        let (mut sum, mut level) = (0.0, BOTTOM);
        for (us, n) in pairs {
            let x = axis.place(*us);
            points.push((x, level));
            sum += float(*n);
            level = BOTTOM - (sum / total).min(1.0) * (BOTTOM - TOP);
            points.push((x, level));
        }
        points.push((RIGHT, level));
        svg.curve(&points, None, class(&one.kind));
    }
    Some(svg.finish())
}

/// Draws the percentiles of pages that are read and written; `None` without data.
fn percentiles(bench: &TransportBench) -> Option<String> {
    let mut rows: Vec<(String, &str, &Percentiles, f64)> = Vec::new();
    for one in &bench.transports {
        let reads = of_pages(one).map(|pages| &pages.trips);
        for (what, trips) in [("read", reads), ("write", one.writes.as_ref())] {
            if let Some(trips) = trips.filter(|trips| trips.round_trips > 0) {
                let name = format!("{} {what}", one.kind);
                rows.push((name, class(&one.kind), &trips.latency_us, trips.p95_us));
            }
        }
    }
    let times = rows
        .iter()
        .flat_map(|(_, _, p, _)| [p.p50, p.p90, p.p99, p.p999, p.max]);
    let (left, top, each) = (104.0, 34.0, 26.0);
    let bottom = top + each * float(rows.len() as u64);
    let axis = LogAxis::for_times(times, (left, RIGHT));
    rows.first()?;
    let mut svg = Svg::new(bottom + 28.0, "Percentiles of pages by transport");
    let key = "bar: p50 to p95; line: to p99; ticks: p99.9 and the longest";
    svg.text(RIGHT, 16.0, Anchor::End, "label", key);
    time_axis(&mut svg, &axis, top, bottom);
    for (row, (name, class, p, p95)) in rows.iter().enumerate() {
        let middle = top + each * (float(row as u64) + 0.5);
        let x = |us: f64| axis.place(us);
        svg.text(left - 8.0, middle + 4.0, Anchor::End, "label", name);
        let (from, thin) = ((x(p.p50), middle), format!("{class} thin"));
        svg.line(from, (x(p.max), middle), &thin);
        let whisker = format!("{class} whisker");
        svg.line(from, (x(p.p99), middle), &whisker);
        let title = format!(
            "{name}: p50 {}, p95 {}, p99 {}, p99.9 {}, max {}",
            time(p.p50),
            time(*p95),
            time(p.p99),
            time(p.p999),
            time(p.max)
        );
        let width = (x(*p95) - x(p.p50)).max(3.0);
        svg.bar((x(p.p50), middle - 7.0), (width, 14.0), class, &title);
        for us in [p.p999, p.max] {
            let x = x(us);
            svg.line((x, middle - 5.0), (x, middle + 5.0), &whisker);
        }
    }
    Some(svg.finish())
}

/// Draws a value by the size of requests, a curve for each transport; `None` without data.
fn by_size(
    bench: &TransportBench,
    label: &str,
    text: fn(f64) -> String,
    of: fn(&OfSize) -> f64,
) -> Option<String> {
    let all = || bench.transports.iter().flat_map(|one| &one.sizes);
    let mut sizes: Vec<u32> = all().map(|of_size| of_size.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if all().all(|of_size| of(of_size) <= 0.0) {
        return None;
    }
    let left = LEFT + 30.0;
    let axis = LogAxis::for_times(all().map(of), (BOTTOM, TOP));
    let steps = float(sizes.len().saturating_sub(1).max(1) as u64);
    let x = |bytes: u32| {
        let at = sizes.iter().position(|size| *size == bytes).unwrap_or(0);
        left + float(at as u64) / steps * (RIGHT - left)
    };
    let mut svg = Svg::new(270.0, label);
    legend(&mut svg, (left, 16.0), &entries(bench));
    for tick in axis.ticks() {
        let y = axis.place(tick);
        svg.line((left, y), (RIGHT, y), "grid");
        svg.text(left - 6.0, y + 4.0, Anchor::End, "label", &text(tick));
    }
    for bytes in &sizes {
        let name = ByteSize::from_bytes((*bytes).into()).to_string();
        svg.line((x(*bytes), BOTTOM), (x(*bytes), BOTTOM + 4.0), "axis");
        svg.text(x(*bytes), BOTTOM + 18.0, Anchor::Middle, "label", &name);
    }
    for one in &bench.transports {
        let measured = one.sizes.iter().filter(|of_size| of(of_size) > 0.0);
        let points: Vec<_> = measured
            .map(|of_size| (of_size, x(of_size.bytes), axis.place(of(of_size))))
            .collect();
        let line: Vec<_> = points.iter().map(|(_, x, y)| (*x, *y)).collect();
        svg.curve(&line, None, class(&one.kind));
        for (of_size, x, y) in points {
            let size = ByteSize::from_bytes(of_size.bytes.into());
            let title = format!("{}, {size}: {}", one.kind, text(of(of_size)));
            svg.bar((x - 3.0, y - 3.0), (6.0, 6.0), class(&one.kind), &title);
        }
    }
    Some(svg.finish())
}

/// Renders all values, for readers who need exact ones.
fn table(page: &mut String, bench: &TransportBench) {
    if bench.transports.is_empty() {
        return;
    }
    page.push_str(
        "<section class=\"wide\">\n<h2>In numbers</h2>\n<div class=\"scroll\"><table>\n<thead><tr>\
         <th>transport</th><th>size</th><th>mean</th><th>p50</th><th>p90</th><th>p95</th>\
         <th>p99</th><th>p99.9</th><th>max</th><th>stream</th><th>CPU a page</th></tr></thead>\n\
         <tbody>\n",
    );
    for one in &bench.transports {
        let reads = one.sizes.iter().map(|of_size| {
            let size = ByteSize::from_bytes(of_size.bytes.into()).to_string();
            let stream = rate(of_size.stream_bytes_per_second / f64::from(1 << 20));
            (size, of_size.trips, stream, time(of_size.cpu_us_per_page))
        });
        let writes = one.writes.map(|trips| {
            let stream = one.write_bytes_per_second.unwrap_or(0.0) / f64::from(1 << 20);
            ("4K written".to_owned(), trips, rate(stream), String::new())
        });
        for (size, trips, stream, cpu) in reads.chain(writes) {
            let kind = escaped(&one.kind);
            let _ = write!(page, "<tr><th>{kind}</th><td>{size}</td>");
            let p = trips.latency_us;
            for us in [
                trips.mean_us,
                p.p50,
                p.p90,
                trips.p95_us,
                p.p99,
                p.p999,
                p.max,
            ] {
                let _ = write!(page, "<td>{}</td>", time(us));
            }
            let _ = writeln!(page, "<td>{stream}</td><td>{cpu}</td></tr>");
        }
    }
    page.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn skipped(page: &mut String, bench: &TransportBench) {
    if bench.skipped.is_empty() {
        return;
    }
    page.push_str("<section class=\"wide\">\n<h2>Not measured</h2>\n<ol>\n");
    for one in &bench.skipped {
        let (kind, reason) = (escaped(&one.kind), escaped(&one.reason));
        let _ = writeln!(page, "<li>{kind}: {reason}</li>");
    }
    page.push_str("</ol>\n</section>\n");
}

#[cfg(test)]
#[path = "transports_tests.rs"]
mod tests;
