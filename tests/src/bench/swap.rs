//! Runs the same work in two guests of the product on emulated hosts: one with part of its memory
//! on another host, and one with the same amount of local memory that swaps to a network block
//! device on that host. In the same rounds a guest of QEMU does it whose memory is on that host and
//! comes by post-copy migration ([`postcopy`]).
//!
//! All sides have the same kernel, initramfs, program, seed, page order, and link, the first two
//! also the same local memory for the whole guest; all verify every byte. See `docs/bench.md`.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::swap_guest::{self, TAP};
use super::{median, number, postcopy, qemu};
use crate::share::Share;
use crate::testbed::{Host, HostImage, HostKernel, RemoteProcess, Testbed, TestbedConfig};

/// No round starts after this time, which bounds the duration on a busy machine.
const ROUNDS_TIME_MAX: Duration = Duration::from_secs(15 * 60);
/// Memory that the program uses. Swapping one page in takes milliseconds under emulation.
const PROGRAM_MIB: u64 = 48;
/// Local memory of each guest: half of the program's memory plus what its kernel uses.
const LOCAL_MIB: u64 = 97;
/// Local memory of an additional run of our side: half of the program's memory, with nothing added
/// for the kernel. A kernel cannot swap out its own memory, but our guest's kernel memory can be
/// remote. With [`LOCAL_MIB`] more than half of the program is therefore local.
const LOCAL_TIGHT_MIB: u64 = PROGRAM_MIB / 2;
/// Allowed deviation of the memory that the guest reports as available from half of the program's.
const HALF_TOLERANCE_MIB: u64 = 6;
/// Memory of the guest whose memory is on both hosts. It exceeds the program's memory by what
/// faultprobe leaves free.
const GUEST_MIB: u64 = 256;
/// Size of the swap device: the remote part of the first guest's memory.
const DEVICE_MIB: u64 = GUEST_MIB - LOCAL_MIB;
/// Deadline of a command.
const COMMAND_DEADLINE: Duration = Duration::from_secs(60);
/// Attempts per run: an emulated host can hang through a fault of the emulator, and the testbed is
/// then restarted.
const ATTEMPTS: usize = 2;
const DONOR_PORT: u16 = 7700;
const DEVICE_PORT: u16 = 10809;
const SEED: u64 = 1;
/// Values of `vm.page-cluster`, the read-ahead of swap: the kernel's default, and none.
const READ_AHEAD: [&str; 2] = ["default", "0"];
/// Names of the logs, one for each entry of [`READ_AHEAD`].
const SWAP: [&str; 2] = ["swap-default", "swap-none"];

/// Runs both sides and compares them.
pub(super) fn measure(workspace: &Path, dir: &Path, rounds: usize) -> anyhow::Result<Value> {
    let share = Share::prepare(workspace)?;
    ensure!(
        share.has_product(),
        "no ssi-hv in target/release: run scripts/bench"
    );
    swap_guest::prepare(workspace, &share)?;
    let qemu = qemu::prepare(workspace, &share)?;
    let image = HostImage::prepare(workspace, HostKernel::Linux6_1)?;
    let mut restarts = Vec::new();
    loop {
        match on_testbed(&share, &image, dir, rounds) {
            Ok(mut result) => {
                result["guest_kernel"] = json!(share.guest_kernel);
                result["postcopy"]["qemu"] = json!(qemu);
                result["restarts"] = json!(restarts);
                return Ok(result);
            }
            Err(error) if restarts.len() + 1 < ATTEMPTS => {
                println!("the testbed is restarted: {error:#}");
                restarts.push(format!("{error:#}"));
            }
            Err(error) => return Err(error),
        }
    }
}

fn on_testbed(
    share: &Share,
    image: &HostImage,
    dir: &Path,
    rounds: usize,
) -> anyhow::Result<Value> {
    let config = TestbedConfig::two_hosts(&share.dir, dir.join("testbed"));
    let testbed = Testbed::start(&config, image)?;
    let (compute, lender) = (testbed.host(1), testbed.host(2));
    connect_guests(compute, lender)?;
    make_device(lender)?;
    let _donor = start_donor(lender)?;
    let begin = Instant::now();
    let mut all = Vec::new();
    while all.len() < rounds && (all.is_empty() || begin.elapsed() < ROUNDS_TIME_MAX) {
        let round = all.len() + 1;
        println!("  round {round} of {rounds} ...");
        let console = |side: &str| dir.join(format!("{side}-{round}.log"));
        let ours = |local, side: &str| {
            run_ours(compute, lender, local, &console(side))
                .with_context(|| format!("on our memory with {local} MiB here"))
        };
        let swap = |index: usize| {
            run_swap(compute, lender, READ_AHEAD[index], &console(SWAP[index]))
                .with_context(|| format!("on swap with read-ahead {}", READ_AHEAD[index]))
        };
        all.push(Round {
            ours: ours(LOCAL_MIB, "ours")?,
            swap: [swap(0)?, swap(1)?],
            tight: ours(LOCAL_TIGHT_MIB, "tight")?,
            postcopy: run_postcopy(compute, lender, &console("postcopy"))?,
        });
    }
    Ok(compare(&all))
}

/// The results of one round, in which each variant runs once in turn.
#[derive(Debug)]
struct Round {
    ours: Value,
    /// One result for each entry of [`READ_AHEAD`].
    swap: [Value; 2],
    /// Our side with [`LOCAL_TIGHT_MIB`].
    tight: Value,
    /// QEMU's post-copy.
    postcopy: Value,
}

/// Runs the program in a guest with `local_mib` of local memory and the rest on the other host.
fn run_ours(host: &Host, lender: &Host, local_mib: u64, console: &Path) -> anyhow::Result<Value> {
    let (memory, local) = (format!("{GUEST_MIB}M"), format!("{local_mib}M"));
    let donor = format!("{}:{DONOR_PORT}", lender.address());
    let flags = [
        "--memory",
        &memory,
        "--local-memory",
        &local,
        "--donor",
        &donor,
        "--transport",
        "tcp",
    ];
    let work = format!("ours {PROGRAM_MIB}M {SEED}");
    let (mut run, report) = swap_guest::run(host, &work, &flags, console)?;
    for key in ["faults", "prefetch", "evictions"] {
        run["pager"][key] = report[key].clone();
    }
    ensure!(
        report["faults"]["remote"]["count"].as_u64() > Some(0),
        "no page came from the donor"
    );
    Ok(run)
}

/// Runs the program in a guest that swaps.
fn run_swap(host: &Host, server: &Host, read_ahead: &str, console: &Path) -> anyhow::Result<Value> {
    let memory = format!("{LOCAL_MIB}M");
    let work = format!(
        "swap {PROGRAM_MIB}M {SEED} {} {DEVICE_PORT} {read_ahead}",
        server.address(),
    );
    let device = serve_device(server)?;
    let (run, _) = swap_guest::run(host, &work, &["--memory", &memory], console)?;
    drop(device);
    ensure!(
        run["pages_swapped_in"].as_u64() > Some(0),
        "the guest with {LOCAL_MIB} MiB did not swap"
    );
    check_half(&run)?;
    Ok(run)
}

/// Runs the program in a guest of QEMU whose memory comes by post-copy.
fn run_postcopy(host: &Host, source: &Host, console: &Path) -> anyhow::Result<Value> {
    let work = format!("postcopy {PROGRAM_MIB}M {SEED}");
    postcopy::run(host, source, GUEST_MIB, &work, console).context("on post-copy of QEMU")
}

/// Checks that half of the program's memory fits the memory that the guest has available for it.
fn check_half(run: &Value) -> anyhow::Result<()> {
    let available = run["available_bytes"].as_u64().context("available_bytes")? >> 20;
    let half = PROGRAM_MIB / 2;
    ensure!(
        available.abs_diff(half) <= HALF_TOLERANCE_MIB,
        "a guest with {LOCAL_MIB} MiB has {available} MiB for programs, and {half} MiB, give or take {HALF_TOLERANCE_MIB}, are to be compared: change LOCAL_MIB"
    );
    Ok(())
}

/// Returns ratios, each the median over the rounds. Those with a target compare with the read-ahead
/// with which swap did better.
fn compare(rounds: &[Round]) -> Value {
    let ratio = |ours: fn(&Round) -> &Value, index: usize, pointer: &str| {
        let ratios = rounds.iter().filter_map(|round| {
            Some(number(ours(round), pointer)? / number(&round.swap[index], pointer)?)
        });
        median(ratios.collect())
    };
    let sides = |ours: fn(&Round) -> &Value| -> Value {
        let against: Vec<Value> = (0..READ_AHEAD.len())
            .map(|index| {
                json!({
                    "read_ahead": READ_AHEAD[index],
                    "latency_p50_ours_to_swap": ratio(ours, index, "/latency_us/p50"),
                    "latency_p90_ours_to_swap": ratio(ours, index, "/latency_us/p90"),
                    "latency_p99_ours_to_swap": ratio(ours, index, "/latency_us/p99"),
                    "times_faster_than_swap": 1.0 / ratio(ours, index, "/elapsed_s"),
                })
            })
            .collect();
        let worst = |key: &str, pick: fn(f64, f64) -> f64| {
            let values = against.iter().filter_map(|side| side[key].as_f64());
            values.reduce(pick)
        };
        json!({
            "latency_p50_ours_to_swap": worst("latency_p50_ours_to_swap", f64::max),
            "latency_p90_ours_to_swap": worst("latency_p90_ours_to_swap", f64::max),
            "latency_p99_ours_to_swap": worst("latency_p99_ours_to_swap", f64::max),
            "times_faster_than_swap": worst("times_faster_than_swap", f64::min),
            "against": against,
        })
    };
    let list = |pick: fn(&Round) -> &Value| rounds.iter().map(pick).collect::<Vec<_>>();
    let mut result = sides(|round| &round.ours);
    let more = json!({
        "hosts": "testbed",
        "program_bytes": PROGRAM_MIB << 20,
        "guest_bytes": GUEST_MIB << 20,
        "local_bytes": LOCAL_MIB << 20,
        "device_bytes": DEVICE_MIB << 20,
        "rounds": rounds.len(),
        "tight": sides(|round| &round.tight),
        "ours": list(|round| &round.ours),
        "swap": {"default": list(|round| &round.swap[0]), "none": list(|round| &round.swap[1])},
    });
    if let (Value::Object(result), Value::Object(more)) = (&mut result, more) {
        result.extend(more);
    }
    result["postcopy"] =
        postcopy::compare(&list(|round| &round.ours), &list(|round| &round.postcopy));
    result["tight"]["local_bytes"] = json!(LOCAL_TIGHT_MIB << 20);
    result["tight"]["ours"] = json!(list(|round| &round.tight));
    result
}

/// Creates a tap for the guest's network card, and routes between the guest and host 2. The largest
/// packet of both sides is that of the link.
fn connect_guests(compute: &Host, lender: &Host) -> anyhow::Result<()> {
    let here = format!(
        "set -e
        ip tuntap add dev {TAP} mode tap
        ip link set {TAP} mtu 9000 up
        ip addr add 192.168.77.1/24 dev {TAP}
        echo 1 >/proc/sys/net/ipv4/ip_forward"
    );
    compute
        .check(&["sh", "-c", &here], COMMAND_DEADLINE)
        .context("a tap on host 1")?;
    let route = format!("ip route add 192.168.77.0/24 via {}", compute.address());
    lender
        .check(&["sh", "-c", &route], COMMAND_DEADLINE)
        .context("the way to guests of host 1")?;
    Ok(())
}

/// Creates a file in host 2's memory for the block device.
fn make_device(host: &Host) -> anyhow::Result<()> {
    // Writing allocates the pages; /tmp is a tmpfs.
    let make = format!("dd if=/dev/zero of=/tmp/device bs=1M count={DEVICE_MIB}");
    host.check(&["sh", "-c", &make], COMMAND_DEADLINE)?;
    Ok(())
}

/// Serves the device to one guest. The server is restarted because a guest that exited may not have
/// disconnected.
fn serve_device(host: &Host) -> anyhow::Result<RemoteProcess> {
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
        &format!("{GUEST_MIB}M"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_medians_and_judged_against_the_better_read_ahead() {
        let run =
            |p50: f64, elapsed: f64| json!({"latency_us": {"p50": p50}, "elapsed_s": elapsed});
        let round = |p50: f64, swap: f64| Round {
            ours: run(p50, 1.0),
            swap: [run(100.0, swap), run(50.0, 2.0 * swap)],
            tight: run(25.0, 1.5),
            postcopy: run(40.0, 1.0),
        };
        let result = compare(&[round(10.0, 2.0), round(20.0, 3.0), round(90.0, 4.0)]);
        assert_eq!(result["against"][0]["latency_p50_ours_to_swap"], 0.2);
        assert_eq!(result["against"][1]["times_faster_than_swap"], 6.0);
        assert_eq!(result["latency_p50_ours_to_swap"], 0.4);
        assert_eq!(result["times_faster_than_swap"], 3.0);
        assert_eq!(result["tight"]["latency_p50_ours_to_swap"], 0.5);
        assert_eq!(result["tight"]["times_faster_than_swap"], 2.0);
        assert_eq!(result["postcopy"]["latency_p50_ours_to_postcopy"], 0.5);
        // An empty set of rounds gives null.
        assert!(result["latency_p99_ours_to_swap"].is_null());
    }

    #[test]
    fn a_guest_with_more_or_less_than_half_is_not_compared() {
        let available = |mib: u64| json!({"available_bytes": mib << 20});
        assert!(check_half(&available(PROGRAM_MIB / 2)).is_ok());
        assert!(check_half(&available(PROGRAM_MIB / 2 + 7)).is_err());
        assert!(check_half(&available(PROGRAM_MIB / 2 - 7)).is_err());
    }
}
