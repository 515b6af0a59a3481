//! Tables of the time of nodes, and of what moves vCPUs between them.

use std::fmt::Write as _;

use ssi_hv_api::report::{PolicyKind, Report};

use super::{name_of, nodes_of};
use crate::svg::{count, escaped, time};

const NONE: &str = "\u{2013}";

/// Renders how the time of each node follows that of node 0; nothing before the first comparison.
pub(super) fn clocks(page: &mut String, report: &Report) {
    let clocks = || nodes_of(report).filter_map(|node| Some((node, node.clock?)));
    if clocks().next().is_none() {
        return;
    }
    page.push_str(
        "<section class=\"wide\">\n<h2>Time of the nodes</h2>\n<p class=\"about\">How the time of \
         each node&#39;s vCPUs follows that of node 0.</p>\n<div class=\"scroll\"><table>\n<thead>\
         <tr><th></th><th>offset</th><th>within</th><th>rate, ppm</th><th>scaled</th>\
         <th>steps</th><th>sum of steps</th></tr></thead>\n<tbody>\n",
    );
    for (node, clock) in clocks() {
        let error = clock.rate_ppm_error_max.filter(|ppm| ppm.is_finite());
        let error = error.map_or_else(String::new, |ppm| format!(" \u{b1} {}", decimal(ppm)));
        let rate = clock.rate_ppm.filter(|ppm| ppm.is_finite());
        let rate = rate.map_or_else(
            || NONE.to_owned(),
            |ppm| format!("{}{error}", signed(ppm, decimal)),
        );
        // Writing to a string cannot fail.
        let _ = writeln!(
            page,
            "<tr><th>{}</th><td>{}</td><td>{}</td><td>{rate}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            name_of(node),
            signed(clock.offset_us, length),
            length(clock.error_us_max),
            if clock.scaled { "yes" } else { "no" },
            count(clock.steps),
            signed(clock.steps_us, length),
        );
    }
    page.push_str("</tbody>\n</table></div>\n</section>\n");
}

/// Formats a number and its sign.
fn signed(value: f64, format: fn(f64) -> String) -> String {
    if !value.is_finite() {
        return NONE.to_owned();
    }
    let sign = match value {
        value if value > 0.0 => "+",
        value if value < 0.0 => "\u{2212}",
        _ => "",
    };
    format!("{sign}{}", format(value.abs()))
}

/// Formats a time that a host reports, which may be anything.
fn length(us: f64) -> String {
    match us.is_finite() {
        true => time(us.clamp(0.0, 1e15)),
        false => NONE.to_owned(),
    }
}

/// Formats millionths, of which there are at most a million.
fn decimal(ppm: f64) -> String {
    format!("{:.2}", ppm.clamp(-1e6, 1e6))
}

/// Renders what moved vCPUs, and why each stays where it is.
pub(super) fn policy(page: &mut String, report: &Report) {
    let Some(used) = &report.vcpu_policy else {
        return;
    };
    let _ = write!(
        page,
        "<section class=\"wide\">\n<h2>What moved vCPUs</h2>\n<p class=\"about\">Policy <code>{}\
         </code>",
        escaped(used.kind.name())
    );
    if used.kind == PolicyKind::Static {
        page.push_str(": only commands, and <code>from=</code> of nodes.</p>\n</section>\n");
        return;
    }
    let _ = writeln!(
        page,
        ": {} moves, {} failed; why each vCPU stayed in the end.</p>",
        count(used.moves),
        count(used.moves_failed)
    );
    if used.vcpus.is_empty() {
        page.push_str("</section>\n");
        return;
    }
    page.push_str(
        "<div class=\"scroll\"><table>\n<thead><tr><th>vCPU</th><th>node</th><th>moves</th>\
         <th>waited in 5 s</th><th>stays because</th></tr></thead>\n<tbody>\n",
    );
    for stays in &used.vcpus {
        let node = nodes_of(report).find(|node| node.cpus.contains(&stays.cpu));
        let node = node.map_or_else(|| NONE.to_owned(), |node| node.id.to_string());
        let longest = stays.stays_s.map_or_else(String::new, |seconds| {
            format!(", for {}", length(seconds * 1e6))
        });
        let _ = writeln!(
            page,
            "<tr><th>{}</th><td>{node}</td><td>{}</td><td>{}</td><td>{}{longest}</td></tr>",
            stays.cpu,
            count(stays.moves.into()),
            length(stays.waited_ms * 1e3),
            escaped(stays.reason.words()),
        );
    }
    page.push_str("</tbody>\n</table></div>\n</section>\n");
}

#[cfg(test)]
mod tests;
