//! The scenario of RDMA for the VM of a user without rights, in a root directory of its own: devices
//! are opened again from there when connections are lost.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::Value;

use super::bed::{add_rxe, on_the_way_to_2, remove_rxe};
use super::control::ask;
use super::donor::Donor;
use super::guest::{BOOT_DEADLINE, Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::rdma::rdma_of;
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "rdma_jailed",
    about: "a VM with another user and root makes lost RDMA connections again, and is refused where it could not",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: jailed,
}];

/// Moves memory for as long as the scenario needs.
const WORK: &str = "while faultprobe --bytes 128M; do echo round=$((1)); done";
/// UDP, and the port of RoCE.
const ROCE: (u8, u16) = (17, 4791);
/// Deadline for RDMA to be used again: attempts are up to 30 s apart.
const AGAIN_DEADLINE: Duration = Duration::from_secs(90);
/// Time between two questions: a VM announces no change of its transport.
const PAUSE: Duration = Duration::from_millis(500);

/// Makes an empty root with the system's files for RDMA and a directory of the user.
const ROOT: &str = "set -e; mkdir -p /run/jail/out /run/jail/sys /run/jail/dev/infiniband; \
    chmod 755 /run /run/jail; chown 65534:65534 /run/jail/out; mount -o bind /sys /run/jail/sys; \
    mount -o bind /dev/infiniband /run/jail/dev/infiniband";
/// What udev sets with the rules of rdma-core.
const OPEN: &str = "chmod 666 /dev/infiniband/uverbs0";
const CLOSED: &str = "chmod 600 /dev/infiniband/uverbs0";
const NO_ROOT: &str = "umount /run/jail/sys && umount /run/jail/dev/infiniband && rm -r /run/jail";

fn jailed(context: &Context<'_>) -> Result {
    let one = context.testbed.host(1);
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    one.check(&["sh", "-c", ROOT], SHORT)?;
    one.check(&["sh", "-c", CLOSED], SHORT)?;
    let donor = Donor::start(context)?;

    let mut guest = Guest::remote(1, WORK);
    guest.report = "/run/jail/out/report.json";
    guest
        .more
        .extend(["--transport", "rdma", "--name", "jailed"]);
    guest
        .more
        .extend(["--user", "65534:65534", "--chroot", "/run/jail"]);
    let refused = guest.start(context)?.wait(SHORT)?;
    ensure!(
        refused.status.code == exit::HOST_ERROR
            && refused.stderr.contains("/dev/infiniband/uverbs0: the user")
            && refused.stderr.contains("rdma-core"),
        "a device that cannot be opened again: {refused:?}"
    );

    one.check(&["sh", "-c", OPEN], SHORT)?;
    let process = guest.boot(context)?;
    let root = format!("/proc/{}/root", process.pid());
    let root = one.check(&["readlink", &root], SHORT)?;
    ensure!(root.trim() == "/run/jail", "the root is {root}");
    process.wait_for_line("round=1", BOOT_DEADLINE + GUEST_DEADLINE)?;
    let vm = format!("vm-{}-jailed", process.pid());
    let now = || -> anyhow::Result<Value> {
        let mut now = ask(context, &vm, "GET", "/v1/transport", "")?;
        Ok(now["donors"][0]["faults_now"].take())
    };
    ensure!(now()? == "rdma", "faults by {}", now()?);
    one.check(&["sh", "-c", &on_the_way_to_2(ROCE, "loss 100%")], SHORT)?;
    process.wait_for_line("pages go on over TCP", SHORT)?;
    context.testbed.clear_netem()?;
    let deadline = Instant::now() + AGAIN_DEADLINE;
    while now()? != "rdma" {
        ensure!(Instant::now() < deadline, "faults still by {}", now()?);
        thread::sleep(PAUSE);
    }
    one.check(&["ssi-hv", "kill", "jailed"], SHORT)?;
    let finished = Finished::read_from(context, guest.report, process.wait(SHORT)?)?;
    let rdma = rdma_of(&finished)?;
    ensure!(
        rdma.pages_read > 1000 && rdma.failures > 0 && rdma.connections > rdma.failures,
        "{rdma:?}"
    );
    context.note(format!(
        "{} pages by READ as nobody in /run/jail, {} connections, {} failures",
        rdma.pages_read, rdma.connections, rdma.failures
    ));
    donor.stop(context)?;
    one.check(&["sh", "-c", NO_ROOT], SHORT)?;
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}
