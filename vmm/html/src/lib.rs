//! Renders a report, or a comparison of transports, as one HTML page that contains its styles and
//! drawings, and no script.

mod charts;
mod shared;
mod svg;
mod transports;

use std::fmt::Write as _;

use ssi_hv_api::report::{Percentiles, Report, Virtualization};
use ssi_hv_api::size::ByteSize;
use svg::{count, escaped, time};
pub use transports::render as render_transports;

/// The page's styles. The colours are those of Okabe and Ito, which people with any colour vision
/// can distinguish (https://jfly.uni-koeln.de/color/).
const STYLE: &str = include_str!("style.css");

/// Renders the page of a report.
#[must_use]
pub fn render(report: &Report) -> String {
    let mut page = head(&title(report));
    header(&mut page, report);
    tiles(&mut page, report);
    page.push_str("<main>\n");
    let none = "No faults of the pager in this report.";
    section(
        &mut page,
        "How long faults took",
        "Share of the faults of each kind, by their time on a logarithmic axis.",
        charts::distribution(report).unwrap_or_else(|| note(none)),
    );
    section(
        &mut page,
        "Where the time went",
        "From reading a fault until its page was mapped; below remote faults their stages.",
        match charts::kinds(report).next() {
            Some(_) => charts::stages(report),
            None => note("No faults."),
        },
    );
    section(
        &mut page,
        "Faults over time",
        "Faults a second since the memory was made ready.",
        charts::over_time(report).unwrap_or_else(|| note(none)),
    );
    section(
        &mut page,
        "Pages by donor",
        "What came from each donor, and what went back there.",
        charts::nodes(&report.nodes).unwrap_or_else(|| {
            note(match report.coherence {
                Some(_) => "No donors: nodes with vCPUs share the memory.",
                None => "No donors: all memory was on this host.",
            })
        }),
    );
    section(
        &mut page,
        "Fetched ahead",
        "What became of pages that were fetched before the guest asked for them.",
        charts::prefetch(&report.prefetch).unwrap_or_else(|| note("No page was fetched ahead.")),
    );
    page.push_str("</main>\n");
    shared::section(&mut page, report);
    table(&mut page, report);
    errors(&mut page, report);
    foot(&mut page, report.schema);
    page
}

/// Begins a page.
fn head(title: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n",
        escaped(title)
    )
}

/// Ends a page.
fn foot(page: &mut String, schema: u32) {
    // Writing to a string cannot fail.
    let _ = write!(
        page,
        "<footer>Report schema {schema}; page by ssi-hv {}</footer>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    );
}

fn title(report: &Report) -> String {
    let kernel = report.guest.kernel.as_deref().unwrap_or("a guest");
    let name = kernel.rsplit('/').next().unwrap_or(kernel);
    format!("SSI-HV: {name}, {}", report.outcome)
}

fn note(text: &str) -> String {
    format!("<p class=\"none\">{}</p>\n", escaped(text))
}

fn header(page: &mut String, report: &Report) {
    let (host, guest) = (&report.host, &report.guest);
    let good = report.outcome == "shutdown" && report.exit_code == 0;
    let class = if good { "good" } else { "bad" };
    let _ = write!(
        page,
        "<header>\n<h1>SSI-HV run <span class=\"badge {class}\">{} \u{b7} exit code {}</span></h1>\n",
        escaped(&report.outcome),
        report.exit_code
    );
    let _ = writeln!(
        page,
        "<p>{} of memory, {} vCPU{}, kernel <code>{}</code></p>",
        ByteSize::from_bytes(guest.memory_bytes).rounded(),
        guest.cpus,
        if guest.cpus == 1 { "" } else { "s" },
        escaped(guest.kernel.as_deref().unwrap_or("none")),
    );
    let _ = writeln!(
        page,
        "<p>on {}, Linux {}</p>",
        escaped(&host.cpu_model),
        escaped(&host.kernel)
    );
    if let Some(exec) = &report.exec {
        let status = exec.exit_status.map_or_else(
            || "no exit status".to_owned(),
            |status| format!("exit status {status}"),
        );
        let _ = writeln!(
            page,
            "<p>command <code>{}</code>: {status}</p>",
            escaped(&exec.command)
        );
    }
    if host.virtualization == Virtualization::Emulated {
        page.push_str(
            "<p class=\"warning\">The host was emulated: its times are not representative, only their ratios.</p>\n",
        );
    }
    page.push_str("</header>\n");
}

fn tiles(page: &mut String, report: &Report) {
    let remote = &report.faults.remote;
    let us = |us: f64| match remote.count {
        0 => "\u{2013}".to_owned(),
        _ => time(us),
    };
    let boot = report.boot.to_init_ms;
    let tiles = [
        ("remote faults", count(remote.count)),
        ("median", us(remote.latency_us.p50)),
        ("99 %", us(remote.latency_us.p99)),
        (
            "transport",
            match report.transport.tier.as_str() {
                "" | "none" => report.transport.kind.clone(),
                tier => format!("{} ({tier})", report.transport.kind),
            },
        ),
        (
            "to init",
            boot.map_or_else(|| "\u{2013}".to_owned(), |ms| time(ms * 1e3)),
        ),
        ("evictions", count(report.evictions)),
        (
            "memory here",
            ByteSize::from_bytes(report.memory.resident_bytes).rounded(),
        ),
    ];
    page.push_str("<dl class=\"tiles\">\n");
    for (name, value) in tiles {
        let _ = writeln!(
            page,
            "<div><dt>{}</dt><dd>{}</dd></div>",
            escaped(name),
            escaped(&value)
        );
    }
    page.push_str("</dl>\n");
}

fn section(page: &mut String, title: &str, about: &str, content: String) {
    let _ = write!(
        page,
        "<section>\n<h2>{}</h2>\n<p class=\"about\">{}</p>\n{content}</section>\n",
        escaped(title),
        escaped(about)
    );
}

/// Renders a table of all percentiles, for readers who need exact values.
fn table(page: &mut String, report: &Report) {
    let mut rows: Vec<(&str, Option<u64>, &Percentiles)> = Vec::new();
    for (name, kind) in charts::kinds(report) {
        rows.push((name, Some(kind.count), &kind.latency_us));
        if name == "remote" {
            rows.push(("\u{2013} queue", None, &kind.stages.queue));
            rows.push(("\u{2013} fetch", None, &kind.stages.fetch));
            rows.push(("\u{2013} install", None, &kind.stages.install));
        }
    }
    if rows.is_empty() {
        return;
    }
    page.push_str(
        "<section class=\"wide\">\n<h2>In numbers</h2>\n<div class=\"scroll\"><table>\n<thead><tr>\
         <th>faults</th><th>count</th><th>p50</th><th>p90</th><th>p99</th><th>p99.9</th>\
         <th>max</th></tr></thead>\n<tbody>\n",
    );
    for (name, number, p) in rows {
        let number = number.map(count).unwrap_or_default();
        let _ = write!(page, "<tr><th>{name}</th><td>{number}</td>");
        for us in [p.p50, p.p90, p.p99, p.p999, p.max] {
            let _ = write!(page, "<td>{}</td>", time(us));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn errors(page: &mut String, report: &Report) {
    if report.errors.is_empty() {
        return;
    }
    page.push_str("<section class=\"wide\">\n<h2>Errors</h2>\n<ol>\n");
    for error in &report.errors {
        let _ = writeln!(page, "<li>{}</li>", escaped(error));
    }
    page.push_str("</ol>\n</section>\n");
}

#[cfg(test)]
mod tests;
