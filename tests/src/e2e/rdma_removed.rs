//! Scenarios in which an RDMA device is removed while pages travel by it, and then added again.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::bed::{add_rxe, remove_rxe};
use super::donor::{DONOR, Donor};
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit, faultprobes};
use super::prometheus::Prometheus;
use super::rdma::{probed, rdma_of};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::Host;

/// Metrics addresses of the VM and the donor.
const VM_METRICS: &str = "10.77.0.1:9464";
const NODE_METRICS: &str = "10.77.0.2:9464";

/// Repeats the probe until the power button is pressed, however long the device takes to recover,
/// and ends with the probe that runs then.
const WORK: &str = "exec 3</dev/input/event0; (head -c 24 <&3 >/dev/null; touch /tmp/end) & \
    until [ -e /tmp/end ]; do faultprobe --bytes 64M || exit 1; done";

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "rdma_removed",
        about: "removing the device under a running guest sends it to TCP, adding it brings it back",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| removed(context, 1),
    },
    Scenario {
        name: "rdma_removed_at_donor",
        about: "the same with the donor's device",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| removed(context, 2),
    },
];

/// Removes the device of one host during continuous writes, and adds it again; returns the probe's
/// result.
fn removed_while_writing(context: &Context<'_>, host: &Host) -> anyhow::Result<Value> {
    let donor = Donor::lending(context, "64M", &[])?;
    let argv = ["/share/rdma-probe", DONOR, "--until-back", "--reads", "0"];
    let process = context.testbed.host(1).spawn(&argv)?;
    process.wait_for_line("WRITING", SHORT)?;
    remove_rxe(host)?;
    add_rxe(host)?;
    let found = probed(&process.wait(GUEST_DEADLINE)?, 0)?;
    let by_tcp = found["pages_written_by_donor"].as_u64();
    ensure!(
        found["failures"] == 1 && by_tcp.is_some_and(|pages| pages > 0),
        "RDMA did not fail once while pages were written: {found}"
    );
    donor.stop(context)?;
    Ok(found)
}

/// Removes the device of one host under a running guest, and adds it again.
fn removed(context: &Context<'_>, number: usize) -> Result {
    let hosts = context.testbed.hosts();
    hosts.iter().try_for_each(add_rxe)?;
    let host = context.testbed.host(number);
    let written = removed_while_writing(context, host)?;
    // In one of the two variants only, since it takes long.
    let prometheus = if number == 1 {
        Some(Prometheus::start(context, &[VM_METRICS, NODE_METRICS])?)
    } else {
        None
    };
    let donor = Donor::lending(context, "1G", &["--metrics", NODE_METRICS])?;
    let mut guest = Guest::small(1, WORK);
    guest.cmdline.push_str(" ssi_modules=\"button evdev\"");
    guest.more.extend(["--name", "goes-on"]);
    guest
        .more
        .extend(["--transport", "rdma", "--metrics", VM_METRICS]);
    let process = guest.boot(context)?;
    remove_rxe(host)?;
    // Pages travel by TCP now, or will when the outstanding READs have failed.
    process.wait_for_line("pages go on over TCP", SHORT)?;
    let by_tcp = "i=0; until ssi-hv status --json | grep -Eq '\"pages_read\": ?[1-9]'; do \
                  i=$((i+1)); [ $i -lt 60 ] || exit 1; sleep 0.5; done";
    let two = context.testbed.host(2);
    two.check(&["sh", "-c", by_tcp], GUEST_DEADLINE)
        .context("no page comes by TCP")?;
    if let Some(prometheus) = &prometheus {
        // Otherwise it could miss the period without RDMA.
        prometheus.wait_for("ssi_hv_donor_rdma == 0")?;
    }
    add_rxe(host)?;
    process.wait_for_line("back on RDMA", GUEST_DEADLINE)?;
    let here = context.testbed.host(1);
    here.check(&["ssi-hv", "shutdown", "goes-on"], SHORT)?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(64 << 20)?;
    let probes = faultprobes(&guest.output.stdout)?;
    ensure!(
        probes.iter().all(|probe| probe["corrupt_bytes"] == 0),
        "{probes:?}"
    );
    let rdma = rdma_of(&guest)?;
    ensure!(
        rdma.failures >= 1 && rdma.connections > rdma.failures && rdma.pages_written > 0,
        "{rdma:?}"
    );
    let (read, _) = donor.stop(context)?;
    ensure!(read > 0, "no page came by TCP meanwhile");
    if let Some(prometheus) = prometheus {
        let moved = prometheus.saw_move("_rdma")?;
        context.note(format!("Prometheus saw {moved} metrics of RDMA move"));
    }
    context.note(format!(
        "{} pages by READ, {read} by TCP; {} connections, {} of them failed; written in {} rounds meanwhile: {} pages by WRITE, {} by TCP",
        rdma.pages_read,
        rdma.connections,
        rdma.failures,
        written["rounds"],
        written["pages_written"],
        written["pages_written_by_donor"],
    ));
    hosts.iter().try_for_each(remove_rxe)?;
    Ok(Verdict::Pass)
}
