//! The demo of one machine from two: a guest with a CPU on each of two hosts.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::{HOST_REPORT, Outcome, PORT, finish, here, show, start_node};
use crate::share::Share;
use crate::testbed::{HostImage, HostKernel, Tap, Testbed, TestbedConfig};

/// Deadline of a guest from start to exit. On emulated hosts its boot alone takes minutes.
const GUEST_DEADLINE: Duration = Duration::from_secs(1500);
/// What the node lends: room for all of the guest's memory, which moves to where it is used.
const LENDS: &[&str] = &["--memory", "512M", "--cpus", "1"];
/// Time of the probe, and parameters of the guest's kernel, on this machine.
const HERE: (u32, &str) = (20, "");
/// The same on emulated hosts. A kernel that is not moved has its page tables at addresses that can
/// be looked up in the list of the hottest pages.
const EMULATED: (u32, &str) = (60, "nokaslr");

/// Returns the arguments of `ssi-hv run`: with the second CPU on a node, or on this host.
fn arguments(share: &str, node: Option<&str>, how: (u32, &str), report: &str) -> Vec<String> {
    let (seconds, parameters) = how;
    // A message of the kernel in the middle of the result would make it unreadable.
    let cmdline =
        format!("loglevel=1 {parameters} ssi_exec=\"faultprobe --ssi --seconds {seconds}\"");
    let (kernel, initrd) = (
        format!("{share}/cloud-vmlinuz"),
        format!("{share}/guest.cpio"),
    );
    let lent = node.map(|address| format!("{address},cpus=1"));
    let mut args = vec![
        "run",
        "--kernel",
        &kernel,
        "--initrd",
        &initrd,
        "--cpus",
        "2",
        "--memory",
        "256M",
        "--cmdline",
        &cmdline,
        "--report",
        report,
    ];
    match &lent {
        Some(lent) => args.extend(["--insecure", "--node", lent]),
        None => args.extend(["--irqchip", "user"]),
    }
    args.into_iter().map(str::to_owned).collect()
}

/// Runs the guest on two processes of this machine, and on one.
pub(super) fn run_here(share: &Share, dir: &Path) -> anyhow::Result<(Outcome, Outcome)> {
    let address = format!("127.0.0.1:{PORT}");
    println!(
        "Lends a CPU:    ssi-hv node --listen {address} {}",
        LENDS.join(" ")
    );
    let node = here::start_node(share, &address, LENDS)?;
    let path = share.dir.display().to_string();
    let report = dir.join("run.json").display().to_string();
    let args = arguments(&path, Some(&address), HERE, &report);
    println!("Runs the guest: ssi-hv {}\n", args.join(" "));
    let two = here::run_guest(share, dir, &args, GUEST_DEADLINE, show)?;
    here::end_node(&node)?;
    println!("\nThe same guest in one process, for comparison...");
    let args = arguments(&path, None, HERE, &report);
    let one = here::run_guest(share, dir, &args, GUEST_DEADLINE, |_| {})?;
    Ok((two, one))
}

/// Runs the guest on two emulated hosts, and on one.
pub(super) fn run_on_testbed(
    workspace: &Path,
    share: &Share,
    dir: &Path,
) -> anyhow::Result<(Outcome, Outcome)> {
    let image = HostImage::prepare(workspace, HostKernel::Linux6_12)?;
    let config = TestbedConfig::two_hosts(&share.dir, workspace.join("target/testbed/demo"));
    let testbed = Testbed::start(&config, &image)?;
    let (primary, lender) = (testbed.host(1), testbed.host(2));
    let address = format!("{}:{PORT}", lender.address());
    println!(
        "Host 2 lends a CPU:    ssi-hv node --listen {address} --insecure {}",
        LENDS.join(" ")
    );
    let _node = start_node(lender, &address, LENDS)?;
    let run = |node: Option<&str>, tap: Tap| -> anyhow::Result<Outcome> {
        let args = arguments("/share", node, EMULATED, HOST_REPORT);
        if node.is_some() {
            println!("Host 1 runs the guest: ssi-hv {}\n", args.join(" "));
        }
        let mut argv = vec!["/share/ssi-hv"];
        argv.extend(args.iter().map(String::as_str));
        let guest = primary.spawn_with(&argv, &[], tap)?;
        finish(primary, &guest, dir, GUEST_DEADLINE)
    };
    let two = run(Some(&address), Box::new(show))?;
    println!("\nThe same guest on one host, for comparison...");
    Ok((two, run(None, Box::new(|_: &[u8]| {}))?))
}

/// Formats what the guest sees, and what its probe measured on two hosts and on one.
pub(super) fn table(two: &Value, one: &Value, report: &Value) -> String {
    let mut text = String::new();
    let machine = &two["ssi"]["machine"];
    let string = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "inside: CPUs {}, {} sockets, {}, clock {}",
        string(&machine["online"]),
        machine["sockets"],
        string(&machine["model"]),
        string(&machine["clock"]),
    );
    for node in machine["nodes"].as_array().into_iter().flatten() {
        let _ = writeln!(
            text,
            "        NUMA node {}: CPUs {}, {} MiB",
            node["node"],
            string(&node["cpus"]),
            node["memory_bytes"].as_u64().unwrap_or(0) >> 20
        );
    }
    for node in report["nodes"].as_array().into_iter().flatten() {
        let cpus = node["cpus"].as_array().filter(|cpus| !cpus.is_empty());
        if let (Some(_), transfers @ Value::Object(_)) = (cpus, &node["transfers"]) {
            let _ = writeln!(
                text,
                "node {}: CPUs {}; pages received {}, sent {}; upgrades {}; tokens {}",
                node["id"],
                node["cpus"],
                transfers["pages_received"],
                transfers["pages_sent"],
                transfers["upgrades"],
                transfers["tokens"],
            );
        }
    }
    let _ = writeln!(
        text,
        "\n{:<36}{:>14}{:>14}{:>9}",
        "", "two hosts", "one host", "ratio"
    );
    let mut row = |name: &str, two: &Value, one: &Value, unit: &str| {
        let number = |value: &Value| match value.as_f64() {
            Some(number) if number < 10.0 => format!("{number:.2}{unit}"),
            Some(number) => format!("{number:.0}{unit}"),
            None => "-".into(),
        };
        let ratio = match (two.as_f64(), one.as_f64()) {
            (Some(two), Some(one)) if one > 0.0 => format!("{:.1}", two / one),
            _ => "-".into(),
        };
        let _ = writeln!(
            text,
            "{name:<36}{:>14}{:>14}{ratio:>9}",
            number(two),
            number(one)
        );
    };
    let boot = &report["boot"];
    row(
        "time to init",
        &boot["to_init_ms"],
        &boot["local_to_init_ms"],
        " ms",
    );
    for (name, pointer) in [
        ("transfer of a page, p50", "/transfers/0/latency_us/p50"),
        ("transfer of a page, p99", "/transfers/0/latency_us/p99"),
        ("wake-up of the other CPU, p50", "/wakes/0/latency_us/p50"),
        ("interrupt and answer, p50", "/calls/0/latency_us/p50"),
        ("interrupt and answer, p99", "/calls/0/latency_us/p99"),
        ("lock handed over, p50", "/ticket_lock/latency_us/p50"),
        ("mutex handed over, p50", "/mutex/latency_us/p50"),
    ] {
        let at = |probe: &Value| probe["ssi"].pointer(pointer).cloned().unwrap_or_default();
        row(name, &at(two), &at(one), " us");
    }
    for (name, kind) in [
        ("two processes, one alone is 1", "process_rate"),
        ("two threads, one alone is 1", "rate"),
    ] {
        let at = |probe: &Value| probe["ssi"][kind]["ratio"].clone();
        row(name, &at(two), &at(one), "");
    }
    row("violations", &two["violations"], &one["violations"], "");
    row(
        "corrupt bytes",
        &two["corrupt_bytes"],
        &one["corrupt_bytes"],
        "",
    );
    let tests = two["ssi"]["ordering"].as_array().map_or(0, Vec::len);
    let verified = two["verified_bytes"].as_u64().unwrap_or(0) >> 10;
    let kind = string(&report["host"]["virtualization"]);
    let _ = write!(
        text,
        "on two hosts: {tests} tests of memory order, {verified} KiB verified; virtualisation {kind}"
    );
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_second_cpu_is_on_the_node_or_on_this_host() {
        let two = arguments("/s", Some("h:1"), (5, "x=1"), "r").join(" ");
        assert!(
            two.ends_with("--report r --insecure --node h:1,cpus=1"),
            "{two}"
        );
        assert!(two.contains("--cmdline loglevel=1 x=1 ssi_exec=\"faultprobe --ssi --seconds 5\""));
        let one = arguments("/s", None, (5, ""), "r").join(" ");
        assert!(
            one.ends_with("--irqchip user") && !one.contains("--node"),
            "{one}"
        );
    }

    #[test]
    fn the_table_compares_two_hosts_with_one() {
        let probe = |p50: f64| {
            json!({
                "ssi": {
                    "machine": {"online": "0-1", "sockets": 1, "nodes": [{"node": 0, "cpus": "0-1", "memory_bytes": 2 << 20}]},
                    "transfers": [{"latency_us": {"p50": p50}}],
                    "rate": {"ratio": 1.9},
                    "process_rate": {"ratio": 1.75},
                    "ordering": [{}, {}],
                },
                "violations": 0, "corrupt_bytes": 0, "verified_bytes": 4096,
            })
        };
        let report = json!({
            "boot": {"to_init_ms": 3000.0, "local_to_init_ms": 1000.0},
            "nodes": [
                {"id": 0, "cpus": [0, 2], "transfers": {"pages_received": 7, "pages_sent": 5, "upgrades": 3, "tokens": 1}},
                {"id": 1, "cpus": [], "transfers": null},
            ],
        });
        let text = table(&probe(50.0), &probe(5.0), &report);
        let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap();
        assert!(
            line("transfer of a page, p50").ends_with("50 us       5.00 us     10.0"),
            "{text}"
        );
        assert!(
            line("time to init").ends_with("3000 ms       1000 ms      3.0"),
            "{text}"
        );
        assert!(
            line("wake-up").ends_with("-             -        -"),
            "{text}"
        );
        assert!(line("two threads").contains("1.9"), "{text}");
        assert!(line("two processes").contains("1.75"), "{text}");
        assert!(text.contains("NUMA node 0: CPUs 0-1, 2 MiB"), "{text}");
        let node = "node 0: CPUs [0,2]; pages received 7, sent 5; upgrades 3; tokens 1";
        assert!(text.contains(node) && !text.contains("node 1:"), "{text}");
        assert!(
            text.contains("2 tests of memory order, 4 KiB verified"),
            "{text}"
        );
    }
}
