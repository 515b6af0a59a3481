//! The same work on our memory and on swap over the network, in two emulated hosts.
//!
//! Both sides are the same program on host 1, `memory-probe`, without a guest around it: once on
//! memory of ours with host 2 as the donor, once on plain memory under a memory limit, which
//! the kernel swaps to a network block device that host 2 serves from its memory. Same seed, same
//! order of pages, same link, same local memory; every byte is verified on both. A guest around
//! the program would cost our side a nested exit for each fault and the other side one for each
//! packet; without it neither is measured.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::{median, number};
use crate::e2e::parse_faultprobe;
use crate::share::Share;
use crate::testbed::{Host, HostImage, RemoteProcess, Testbed, TestbedConfig};

/// How often each side runs, in turn.
const ROUNDS: usize = 3;
/// Memory that the program uses. An emulated page swapped in takes milliseconds.
const PROGRAM_MIB: u64 = 64;
/// How much of it may be local: half.
const LOCAL_MIB: u64 = PROGRAM_MIB / 2;
/// What the limit on the other side has on top, for the program itself: its code, its lists and
/// page tables, some 3 MiB. Ours are not counted either.
const PROGRAM_ITSELF_MIB: u64 = 4;
/// The block device: room for everything.
const DEVICE_MIB: u64 = 256;
/// How long one run of the program may take.
const PROGRAM_DEADLINE: Duration = Duration::from_secs(600);
/// How long anything else may take.
const COMMAND_DEADLINE: Duration = Duration::from_secs(60);
/// An emulated host can hang for reasons of its own; then the bed is started anew, so often.
const ATTEMPTS: usize = 2;
const DONOR_PORT: u16 = 7700;
const DEVICE_PORT: u16 = 10809;

/// Runs both sides and compares them.
pub(super) fn measure(workspace: &Path, dir: &Path) -> anyhow::Result<Value> {
    let share = Share::prepare(workspace)?;
    ensure!(
        share.has_product(),
        "no ssi-hv in target/release: run scripts/bench"
    );
    let image = HostImage::prepare(workspace)?;
    let mut restarts = Vec::new();
    loop {
        match on_testbed(&share, &image, dir) {
            Ok(mut result) => {
                result["restarts"] = json!(restarts);
                return Ok(result);
            }
            Err(error) if restarts.len() + 1 < ATTEMPTS => {
                println!("the testbed is started anew: {error:#}");
                restarts.push(format!("{error:#}"));
            }
            Err(error) => return Err(error),
        }
    }
}

fn on_testbed(share: &Share, image: &HostImage, dir: &Path) -> anyhow::Result<Value> {
    let config = TestbedConfig::two_hosts(&share.dir, dir.join("testbed"));
    let testbed = Testbed::start(&config, image)?;
    let (compute, lender) = (testbed.host(1), testbed.host(2));
    let _server = serve_device(lender)?;
    attach_swap(compute, lender)?;
    let _donor = start_donor(lender)?;
    let program = format!("/share/memory-probe --bytes {PROGRAM_MIB}M");
    let ours = format!(
        "exec {program} --local {LOCAL_MIB}M --donor {}:{DONOR_PORT}",
        lender.address()
    );
    let theirs = format!("echo $$ >/sys/fs/cgroup/bench/cgroup.procs; exec {program}");
    let (mut our_runs, mut swap_runs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        our_runs.push(run(compute, &ours).context("on our memory")?);
        let before = pages_swapped_in(compute)?;
        let mut swapped = run(compute, &theirs).context("on swap")?;
        let pages = pages_swapped_in(compute)? - before;
        ensure!(
            pages > 0,
            "the program with a limit of {LOCAL_MIB} MiB did not swap"
        );
        swapped["pages_swapped_in"] = json!(pages);
        swap_runs.push(swapped);
    }
    Ok(compare(&our_runs, &swap_runs))
}

/// Ratios, each the median over the rounds.
fn compare(ours: &[Value], swap: &[Value]) -> Value {
    let ratio = |pointer: &str, invert: bool| {
        let ratios = ours.iter().zip(swap).filter_map(|(ours, swap)| {
            let ratio = number(ours, pointer)? / number(swap, pointer)?;
            Some(if invert { 1.0 / ratio } else { ratio })
        });
        median(ratios.collect())
    };
    json!({
        "hosts": "testbed",
        "program_bytes": PROGRAM_MIB << 20,
        "local_bytes": LOCAL_MIB << 20,
        "rounds": ours.len(),
        "latency_p50_ours_to_swap": ratio("/latency_us/p50", false),
        "latency_p99_ours_to_swap": ratio("/latency_us/p99", false),
        "times_faster_than_swap": ratio("/elapsed_s", true),
        "ours": ours,
        "swap": swap,
    })
}

/// Serves host 2's memory as a block device.
fn serve_device(host: &Host) -> anyhow::Result<RemoteProcess> {
    // Written, so that its pages are there; /tmp is a tmpfs.
    let make = format!("dd if=/dev/zero of=/tmp/device bs=1M count={DEVICE_MIB}");
    host.check(&["sh", "-c", &make], COMMAND_DEADLINE)?;
    let address = format!("{}:{DEVICE_PORT}", host.address());
    let server = host.spawn(&[
        "nbd-server",
        &address,
        "/tmp/device",
        "-C",
        "/dev/null",
        "-d",
    ])?;
    wait_listening(host, &server, DEVICE_PORT).context("nbd-server")?;
    Ok(server)
}

fn start_donor(host: &Host) -> anyhow::Result<RemoteProcess> {
    let address = format!("{}:{DONOR_PORT}", host.address());
    let donor = host.spawn(&[
        "/share/ssi-hv",
        "node",
        "--listen",
        &address,
        "--memory",
        &format!("{DEVICE_MIB}M"),
        "--insecure",
    ])?;
    wait_listening(host, &donor, DONOR_PORT).context("ssi-hv node")?;
    Ok(donor)
}

fn wait_listening(host: &Host, process: &RemoteProcess, port: u16) -> anyhow::Result<()> {
    let script = format!(
        "i=0; until ss -Hltn | grep -q :{port}; do i=$((i+1)); [ $i -lt 200 ] && [ -e /proc/{} ] || exit 1; sleep 0.1; done",
        process.pid()
    );
    if let Err(error) = host.check(&["sh", "-c", &script], COMMAND_DEADLINE) {
        let (out, err) = (process.stdout(), process.stderr());
        bail!("it does not listen: {error}; it wrote: {out}{err}");
    }
    Ok(())
}

/// Makes the device host 1's swap, and a control group with the limit.
///
/// No read-ahead: pages are visited in random order, where it would only cost.
fn attach_swap(host: &Host, server: &Host) -> anyhow::Result<()> {
    let limit = (LOCAL_MIB + PROGRAM_ITSELF_MIB) << 20;
    let script = format!(
        "set -e
        nbd-client {} {DEVICE_PORT} /dev/nbd0 -N '' -b 4096 -swap
        mkswap /dev/nbd0
        swapon /dev/nbd0
        grep -q nbd0 /proc/swaps
        echo 0 >/proc/sys/vm/page-cluster
        mkdir -p /sys/fs/cgroup
        mount -t cgroup2 cgroup2 /sys/fs/cgroup
        echo +memory >/sys/fs/cgroup/cgroup.subtree_control
        mkdir /sys/fs/cgroup/bench
        echo {limit} >/sys/fs/cgroup/bench/memory.max",
        server.address()
    );
    host.check(&["sh", "-c", &script], COMMAND_DEADLINE)
        .context("swap on a network block device")?;
    Ok(())
}

/// One run of the program: its line of results.
fn run(host: &Host, script: &str) -> anyhow::Result<Value> {
    let output = host.run(&["sh", "-c", script], PROGRAM_DEADLINE)?;
    ensure!(
        output.status.code == 0,
        "{}: {}",
        output.status,
        output.stderr.trim()
    );
    let result = parse_faultprobe(&output.stdout)?;
    ensure!(
        result["corrupt_bytes"] == 0,
        "{} corrupt bytes",
        result["corrupt_bytes"]
    );
    Ok(result)
}

fn pages_swapped_in(host: &Host) -> anyhow::Result<u64> {
    let text = host.check(&["cat", "/proc/vmstat"], COMMAND_DEADLINE)?;
    let line = text.lines().find_map(|line| line.strip_prefix("pswpin "));
    line.and_then(|count| count.trim().parse().ok())
        .context("no pswpin in /proc/vmstat")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_medians_over_rounds_and_larger_is_faster() {
        let run =
            |p50: f64, elapsed: f64| json!({"latency_us": {"p50": p50}, "elapsed_s": elapsed});
        let ours = [run(10.0, 1.0), run(20.0, 1.0), run(90.0, 1.0)];
        let swap = [run(100.0, 2.0), run(100.0, 3.0), run(100.0, 4.0)];
        let result = compare(&ours, &swap);
        assert_eq!(result["latency_p50_ours_to_swap"], 0.2);
        assert_eq!(result["times_faster_than_swap"], 3.0);
        // Nothing measured is nothing said.
        assert!(result["latency_p99_ours_to_swap"].is_null());
    }
}
