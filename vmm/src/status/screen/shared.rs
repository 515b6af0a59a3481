//! The lines of a VM whose vCPUs are on several nodes.

use std::collections::{BTreeMap, BTreeSet};

use super::{micros, size};
use crate::config::cpu_list::CpuList;
use crate::report::{
    Coherence, HotPage, NodeClock, NodeState, PolicyKind, PolicyUsed, Role, StayReason,
};
use crate::status::{NodeNow, VcpuNow, VcpuState, VmStatus};

/// Hot pages that are shown; the JSON has more.
const HOT_SHOWN: usize = 5;

/// Longest line.
const COLUMNS: usize = 80;

/// Returns the lines below the memory.
pub fn lines(status: &VmStatus, coherence: &Coherence) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<4} {:<8} {:<8} {:>9} {:>8} {:>8} {:>7} {:>8}  address",
        "node", "vCPUs", "state", "requests", "received", "sent", "early", "trip, us"
    )];
    lines.extend(status.nodes.iter().map(node));
    lines.push(String::new());
    lines.extend(paths(status, COLUMNS));
    lines.extend(clocks(&status.nodes, COLUMNS));
    lines.extend(totals(coherence));
    lines.extend(vcpus(&status.vcpus, COLUMNS));
    if let Some(used) = &status.vcpu_policy {
        lines.extend(policy(used, COLUMNS));
    }
    lines.extend(hottest(coherence, HOT_SHOWN));
    lines
}

fn node(now: &NodeNow) -> String {
    let node = &now.node;
    let transfers = node.transfers.unwrap_or_default();
    let (requests, early) = match node.role {
        Role::Donor => ("-".to_owned(), "-".to_owned()),
        Role::Compute => (
            requested(&transfers).to_string(),
            transfers.early_losses.to_string(),
        ),
    };
    // A donor receives what is written back to it.
    format!(
        "{:<4} {:<8} {:<8} {:>9} {:>8} {:>8} {:>7} {:>8}  {}",
        node.id,
        work(now),
        state_of(now),
        requests,
        transfers.pages_received + node.pages_written_back,
        transfers.pages_sent + node.pages_fetched,
        early,
        round_trip(now).map_or("-".to_owned(), micros),
        node.address.as_deref().unwrap_or("-"),
    )
}

/// What a node does: the numbers of its vCPUs, or that it is a donor.
pub fn work(now: &NodeNow) -> String {
    match now.node.role {
        Role::Donor => "donor".to_owned(),
        Role::Compute => numbers(&now.node.cpus),
    }
}

/// Names the state of a node or of the link to a donor.
pub fn state_of(now: &NodeNow) -> &'static str {
    match (&now.link, now.node.role) {
        (Some(link), Role::Donor) if link.reachable => "up",
        (Some(_), Role::Donor) => "away",
        _ => state(now.node.state),
    }
}

/// The last round trip to a node or donor, in microseconds.
pub fn round_trip(now: &NodeNow) -> Option<f64> {
    let to_donor = now.link.as_ref().map(|link| link.round_trip_us);
    now.node.round_trip_us.or(to_donor)
}

/// All requests of a node for pages.
pub fn requested(transfers: &crate::report::Transfers) -> u64 {
    let (reads, writes) = (transfers.reads, transfers.writes);
    reads
        .saturating_add(writes)
        .saturating_add(transfers.upgrades)
}

/// Names the state of a node.
pub const fn state(state: Option<NodeState>) -> &'static str {
    match state {
        Some(NodeState::Starting) => "starting",
        Some(NodeState::Up) => "up",
        Some(NodeState::Silent) => "silent",
        Some(NodeState::Ended) => "ended",
        Some(NodeState::Lost) => "lost",
        None => "-",
    }
}

/// Formats rising numbers, such as 0-3 or 0,2.
pub fn numbers(numbers: &[u32]) -> String {
    match numbers {
        [] => "-".to_owned(),
        _ => CpuList(numbers.to_vec()).to_string(),
    }
}

/// Describes what all nodes did together.
pub fn totals(coherence: &Coherence) -> Vec<String> {
    let total = &coherence.total;
    let (hold, request) = (&total.hold_us, &total.request_us);
    vec![
        format!(
            "shared     {} reads, {} writes, {} upgrades; {} invalidations",
            total.reads, total.writes, total.upgrades, total.invalidations
        ),
        format!(
            "           {} pages moved, {} from home, {} zero; {} split blocks of {}",
            total.pages_received,
            total.pages_from_home,
            total.pages_zero,
            total.split_blocks,
            size(memory_fabric::BLOCK_BYTES),
        ),
        format!(
            "           request {} us, 99 % {} us; {} held for {} us, 99 % {} us",
            micros(request.p50),
            micros(request.p99),
            total.holds,
            micros(hold.p50),
            micros(hold.p99)
        ),
        format!(
            "           {} pages lost early, {} requested ahead, {} tokens; {} faults waited for memory",
            total.early_losses, total.requested_ahead, total.tokens, total.stalled_for_memory
        ),
        format!(
            "           {} merged page tables, {} changes of them, for which {} messages waited",
            total.merged_tables, total.table_changes, total.held_for_tables
        ),
    ]
}

/// Describes how memory travels between nodes, in lines of at most so many columns: the pairs are
/// named where they differ.
pub fn paths(status: &VmStatus, columns: usize) -> Vec<String> {
    let mut pairs = BTreeMap::new();
    for now in &status.nodes {
        let id = now.node.id;
        for peer in &now.node.peers {
            let pair = (id.min(peer.node), id.max(peer.node));
            // Both ends say the same, but for a moment after a new connection.
            pairs.entry(pair).or_insert(peer.transport.name());
        }
    }
    let all: BTreeSet<_> = pairs.values().copied().collect();
    let names = match all.len() {
        0 => return Vec::new(),
        1 => all.into_iter().map(str::to_owned).collect(),
        _ => {
            let pairs = pairs.iter();
            let named = pairs.map(|((one, other), name)| format!("{one}-{other} {name}"));
            named.collect::<Vec<_>>()
        }
    };
    wrapped("travels", names, columns)
}

/// Puts parts behind a title, in lines of at most so many columns.
fn wrapped(title: &str, parts: impl IntoIterator<Item = String>, columns: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = format!("{title:<9}");
    for part in parts {
        if line.len() + 2 + part.len() > columns {
            lines.push(std::mem::replace(&mut line, " ".repeat(9)));
        }
        line += "  ";
        line += &part;
    }
    lines.push(line);
    lines
}

/// Describes how the time of each node follows that of node 0, in lines of at most so many columns.
pub fn clocks(nodes: &[NodeNow], columns: usize) -> Vec<String> {
    let clocks = nodes
        .iter()
        .filter_map(|now| Some((now.node.id, now.node.clock?)));
    let parts: Vec<_> = clocks.map(|(id, clock)| of_clock(id, &clock)).collect();
    match parts.is_empty() {
        true => Vec::new(),
        false => wrapped("time", parts, columns),
    }
}

fn of_clock(node: u32, clock: &NodeClock) -> String {
    let rate = clock.rate_ppm.map(|ppm| ppm.clamp(-1e6, 1e6));
    let rate = rate.map_or(String::new(), |ppm| format!(", {ppm:+.1} ppm"));
    let scaled = if clock.scaled { ", scaled" } else { "" };
    format!(
        "{node}: within {}{rate}, {} steps{scaled}",
        span(clock.error_us_max),
        clock.steps
    )
}

/// Formats a time that another host reports, which may be anything.
fn span(us: f64) -> String {
    if us < 1e3 {
        format!("{:.1} us", us.max(0.0))
    } else if us < 1e6 {
        format!("{:.1} ms", us / 1e3)
    } else {
        format!("{:.1} s", us.min(1e15) / 1e6)
    }
}

/// Describes what moves vCPUs, and why it moves no other now, in lines of at most so many columns.
pub fn policy(used: &PolicyUsed, columns: usize) -> Vec<String> {
    let kind = used.kind.name();
    if used.kind == PolicyKind::Static {
        return wrapped("policy", [kind.to_owned()], columns);
    }
    let (moves, failed) = (used.moves, used.moves_failed);
    let moves = format!("{kind}: {moves} moves, {failed} failed");
    let mut reasons: BTreeMap<StayReason, (usize, f64)> = BTreeMap::new();
    for stays in &used.vcpus {
        let (count, longest) = reasons.entry(stays.reason).or_default();
        *count += 1;
        *longest = longest.max(stays.stays_s.unwrap_or(0.0));
    }
    let reasons = reasons.into_iter().map(|(reason, (count, longest))| {
        let time = match reason {
            StayReason::Moved => format!(" ({longest:.0} s)"),
            _ => String::new(),
        };
        format!("{count} {}{time}", reason.words())
    });
    wrapped("policy", [moves].into_iter().chain(reasons), columns)
}

/// Describes what each vCPU does, in lines of at most so many columns.
pub fn vcpus(vcpus: &[VcpuNow], columns: usize) -> Vec<String> {
    let parts = vcpus.iter().map(|vcpu| {
        let what = match (vcpu.state, vcpu.page) {
            (VcpuState::Page, Some(page)) => format!("waits for {page:#x}"),
            (VcpuState::Page, None) => "waits for a page".to_owned(),
            (VcpuState::Running, _) => "running".to_owned(),
            (VcpuState::Halted, _) => "halted".to_owned(),
            (VcpuState::Offline, _) => "offline".to_owned(),
            (VcpuState::Paused, _) => "paused".to_owned(),
            (VcpuState::Unknown, _) => "unknown".to_owned(),
        };
        format!("{} on {}: {what}", vcpu.cpu, vcpu.node)
    });
    wrapped("vCPUs", parts, columns)
}

/// Lists the pages that nodes take from each other most often.
pub fn hottest(coherence: &Coherence, most: usize) -> Vec<String> {
    let pages = coherence.hottest.iter().take(most);
    let lines = pages.enumerate().map(|(index, page)| {
        let title = if index == 0 { "hot pages" } else { "" };
        format!("{title:<10} {}", hot(page))
    });
    lines.collect()
}

/// Two nodes fit in 80 columns.
fn hot(page: &HotPage) -> String {
    let nodes = page.nodes.iter();
    let nodes = nodes.map(|got| format!("{}: {} + {}", got.node, got.reads, got.writes));
    let nodes: Vec<_> = nodes.collect();
    format!(
        "{:#x} moved {}, read + write: {}",
        page.address,
        page.transfers,
        nodes.join(", ")
    )
}
