//! The scenario of a guest that gets more memory while it runs, from a donor that joins for that, and
//! gives it back.

use std::time::Instant;

use anyhow::{bail, ensure};

use super::guest::{
    BOOT_DEADLINE, DONOR_2, Donor, Finished, GUEST_DEADLINE, Guest, INIT_REACHED, SHORT, exit,
};
use super::status::{json, number};
use super::{Context, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "hotplug",
    about: "a donor joins, a running guest uses its memory, gives it back, and the donor leaves",
    needs_product: true,
    run: hotplug,
}];

/// What is added.
const ADDED_BYTES: u64 = 256 << 20;
const ADDED: &str = "256M";
/// What the guest writes and checks: more than it has without what is added.
const PROBE_BYTES: u64 = 128 << 20;

/// Waits until there is more memory, uses it, and waits until it is gone.
const WORK: &str = "total() { grep MemTotal /proc/meminfo | tr -dc 0-9; }; a=$(total); \
    echo begins=$a.; until [ $(total) -gt $((a+200000)) ]; do usleep 200000; done; \
    echo grown=$(total).; faultprobe --bytes 128M; s=$?; echo probed=$s.; \
    until [ $(total) -lt $((a+50000)) ]; do usleep 200000; done; \
    echo shrunk=$(total).; (exit $s)";

fn hotplug(context: &Context<'_>) -> Result {
    let (here, there) = (context.testbed.host(1), context.testbed.host(2));
    let (donor, joins) = (Donor::start(context)?, Donor::second(context)?);
    let mut guest = Guest {
        memory: "176M",
        local_memory: Some("128M"),
        ..Guest::remote(1, WORK)
    };
    guest.cmdline.push_str(" ssi_modules=virtio_mem");
    guest
        .more
        .extend(["--name", "grows", "--hotplug-memory", "1280M"]);
    let process = guest.start(context)?;
    process.wait_for_line(INIT_REACHED, BOOT_DEADLINE)?;
    process.wait_for_line("begins=", BOOT_DEADLINE)?;

    // Nobody there; and one that has less. The guest hears of neither.
    for (size, donor, why) in [
        (ADDED, "10.77.0.2:7702", "connect"),
        ("1280M", DONOR_2, "refuses"),
    ] {
        let argv = [
            "ssi-hv", "hotplug", "grows", "--memory", size, "--donor", donor,
        ];
        let refused = here.run(&argv, SHORT)?;
        ensure!(
            refused.status.code == exit::HOST_ERROR && refused.stderr.contains(why),
            "{refused:?}"
        );
    }
    let asked = Instant::now();
    let tell = |argv: &[&str]| here.check(argv, SHORT);
    let grow = [
        "ssi-hv", "hotplug", "grows", "--memory", ADDED, "--wait", "25", "--donor", DONOR_2,
    ];
    let said = tell(&grow)?;
    ensure!(said.contains("256 MiB plugged of 256 MiB"), "{said}");
    let grew = asked.elapsed();
    process.wait_for_line("grown=", SHORT)?;
    let status = json(here, &["ssi-hv", "status", "grows", "--json"])?;
    for (pointer, wanted) in [
        ("/vms/0/memory/hotplug/plugged_bytes", ADDED_BYTES),
        ("/vms/0/nodes/2/memory_bytes", ADDED_BYTES),
        ("/vms/0/guest/memory_bytes", 176 << 20),
    ] {
        ensure!(number(&status, pointer)? == wanted, "{pointer}: {status}");
    }

    process.wait_for_line("probed=0.", GUEST_DEADLINE)?;
    let asked = Instant::now();
    tell(&[
        "ssi-hv", "hotplug", "grows", "--memory", "0", "--wait", "25",
    ])?;
    let shrank = asked.elapsed();
    process.wait_for_line("shrunk=", SHORT)?;
    let deadline = Instant::now() + SHORT;
    loop {
        let nodes = json(there, &["/share/ssi-hv", "status", "--json"])?;
        let nodes = nodes["nodes"].as_array().cloned().unwrap_or_default();
        let left = nodes.iter().find(|node| node["listen"] == DONOR_2);
        match left {
            Some(node) if node["leases"] == 0 && node["lent_bytes"] == 0 => break,
            _ if Instant::now() < deadline => {}
            _ => bail!("the donor has not its memory back: {nodes:?}"),
        }
    }

    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(PROBE_BYTES)?;
    ensure!(guest.number("/memory/hotplug/plugged_bytes")? == 0.0);
    ensure!(guest.number("/nodes/2/memory_bytes")? == 0.0);
    let (fetched, written) = (
        guest.number("/nodes/2/pages_fetched")?,
        guest.number("/nodes/2/pages_written_back")?,
    );
    ensure!(
        written > 1000.0 && fetched > 1000.0,
        "{fetched} fetched, {written} written"
    );
    let (read, stored) = joins.stop(context)?;
    ensure!(
        stored.to_string() == written.to_string() && read.to_string() == fetched.to_string(),
        "the donor sent {read} and stored {stored}, the guest's host counts {fetched} and {written}"
    );
    donor.stop(context)?;
    context.note(format!(
        "256M came in {} ms and went in {} ms, emulated; {fetched} pages came from the donor that joined",
        grew.as_millis(),
        shrank.as_millis()
    ));
    Ok(Verdict::Pass)
}
