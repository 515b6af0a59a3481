//! Tables of the memory that nodes with vCPUs share.

mod placed;

use std::fmt::Write as _;

use ssi_hv_api::report::{Coherence, Node, Report, Role, Transfers};

use crate::svg::{count, escaped, time};

/// Hot pages in the table.
const PAGES_SHOWN: usize = 20;

/// A row of the table of nodes: a name, and a value of a node or of all.
type Row = (&'static str, fn(&Transfers) -> String);

const ROWS: [Row; 18] = [
    ("faults", |t| count(t.faults)),
    ("requests to read", |t| count(t.reads)),
    ("requests to write", |t| count(t.writes)),
    ("upgrades", |t| count(t.upgrades)),
    ("pages from other nodes", |t| count(t.pages_received)),
    ("pages from home", |t| count(t.pages_from_home)),
    ("pages of zeroes", |t| count(t.pages_zero)),
    ("pages sent", |t| count(t.pages_sent)),
    ("invalidations", |t| count(t.invalidations)),
    ("request, median", |t| time(t.request_us.p50)),
    ("request, 99 %", |t| time(t.request_us.p99)),
    ("hold, median", |t| time(t.hold_us.p50)),
    ("hold, 99 %", |t| time(t.hold_us.p99)),
    ("pages lost early", |t| count(t.early_losses)),
    ("pages requested ahead", |t| count(t.requested_ahead)),
    ("tokens", |t| count(t.tokens)),
    ("blocks split at the end", |t| count(t.split_blocks)),
    ("changes of merged page tables", |t| count(t.table_changes)),
];

/// Renders the section of a VM whose vCPUs are on several nodes.
pub fn section(page: &mut String, report: &Report) {
    let Some(coherence) = &report.coherence else {
        return;
    };
    page.push_str(
        "<section class=\"wide\">\n<h2>Memory that nodes share</h2>\n<p class=\"about\">What each \
         node with vCPUs asked for, got and gave.</p>\n<div class=\"scroll\"><table>\n<thead><tr>\
         <th></th>",
    );
    let nodes = || nodes_of(report);
    for node in nodes() {
        // Writing to a string cannot fail.
        let _ = write!(page, "<th>{}</th>", name_of(node));
    }
    page.push_str("<th>all</th></tr></thead>\n<tbody>\n<tr><th>vCPUs</th>");
    for node in nodes() {
        let _ = write!(page, "<td>{}</td>", node.cpus.len());
    }
    let _ = writeln!(page, "<td>{}</td></tr>", report.guest.cpus);
    for (name, of) in ROWS {
        let _ = write!(page, "<tr><th>{name}</th>");
        for node in nodes() {
            let _ = write!(page, "<td>{}</td>", of(&node.transfers.unwrap_or_default()));
        }
        let _ = writeln!(page, "<td>{}</td></tr>", of(&coherence.total));
    }
    page.push_str("</tbody>\n</table></div>\n</section>\n");
    placed::clocks(page, report);
    placed::policy(page, report);
    hottest(page, coherence);
}

fn nodes_of(report: &Report) -> impl Iterator<Item = &Node> {
    let nodes = report.nodes.iter();
    nodes.filter(|node| node.role == Role::Compute)
}

/// Names a node, as HTML.
fn name_of(node: &Node) -> String {
    let address = node.address.as_deref().unwrap_or("here");
    format!("node {} ({})", node.id, escaped(address))
}

fn hottest(page: &mut String, coherence: &Coherence) {
    if coherence.hottest.is_empty() {
        return;
    }
    page.push_str(
        "<section class=\"wide\">\n<h2>The hottest pages</h2>\n<p class=\"about\">Pages that nodes \
         took from each other most often, and who took them.</p>\n<div class=\"scroll\"><table>\n\
         <thead><tr><th>guest-physical address</th><th>moved</th><th>to read</th><th>to write</th>\
         <th>by node, to read + to write</th></tr></thead>\n<tbody>\n",
    );
    for hot in coherence.hottest.iter().take(PAGES_SHOWN) {
        let sum = |of: fn(&ssi_hv_api::report::HotPageNode) -> u64| {
            hot.nodes.iter().map(of).fold(0, u64::saturating_add)
        };
        let by_node = hot.nodes.iter().map(|got| {
            let (node, reads, writes) = (got.node, count(got.reads), count(got.writes));
            format!("{node}: {reads} + {writes}")
        });
        let by_node: Vec<String> = by_node.collect();
        let _ = writeln!(
            page,
            "<tr><th><code>{:#x}</code></th><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            hot.address,
            count(hot.transfers),
            count(sum(|node| node.reads)),
            count(sum(|node| node.writes)),
            by_node.join(", "),
        );
    }
    page.push_str("</tbody>\n</table></div>\n</section>\n");
}
