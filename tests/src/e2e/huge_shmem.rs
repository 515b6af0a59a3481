//! Scenarios on a host that uses huge pages for all shared memory.

use anyhow::{Context as _, ensure};

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};
use crate::testbed::Host;

/// The host's setting.
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// Memory that the probe uses sequentially, so that much of it is prefetched.
const PROBE_BYTES: u64 = 64 << 20;
const LOCAL_BYTES: u64 = 64 << 20;

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "huge_shmem",
    about: "a host that makes huge pages of shared memory unasked loses no byte, nor a guest that runs",
    needs_product: true,
    hosts: Hosts::TWO_6_1,
    run: huge_shmem,
}];

fn huge_shmem(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let Some(before) = Setting::now(host)? else {
        return Ok(Verdict::Skip(format!("host 1 has no {SETTING}")));
    };
    let donor = Donor::start(context)?;
    let guest = Guest {
        local_memory: Some("64M"),
        more: vec!["--transport", "tcp"],
        ..Guest::small(1, "faultprobe --bytes 64M --pattern sequential")
    };

    // With the setting in force when the guest starts, its memory must not be in huge pages, which
    // would exceed the budget.
    let setting = Setting::change(host, &before)?;
    let made = huge_pages_made(host)?;
    let finished = guest.run(context)?;
    check(&finished)?;
    let made_at_start = huge_pages_made(host)? - made;
    let resident = finished.number("/memory/resident_bytes")?;
    ensure!(
        resident <= LOCAL_BYTES as f64,
        "{resident} bytes resident, {LOCAL_BYTES} is the budget"
    );
    setting.put_back()?;

    // With the setting changed while the guest runs, prefetching finds neighbours that are already
    // present.
    let process = guest.boot(context)?;
    let setting = Setting::change(host, &before)?;
    let made = huge_pages_made(host)?;
    let finished = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    check(&finished)?;
    let made_later = huge_pages_made(host)? - made;
    setting.put_back()?;

    context.note(format!(
        "huge pages made: {made_at_start} when set before the start, {made_later} when set while the guest runs"
    ));
    donor.stop(context)?;
    Ok(Verdict::Pass)
}

/// Checks that every byte was right, and that pages were prefetched.
fn check(guest: &Finished) -> anyhow::Result<()> {
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(PROBE_BYTES)?;
    let issued = guest.number("/prefetch/issued")?;
    ensure!(issued > 1000.0, "only {issued} pages were fetched ahead");
    Ok(())
}

/// Returns how many huge pages of files and shared memory the kernel has allocated since boot.
fn huge_pages_made(host: &Host) -> anyhow::Result<u64> {
    let counters = host.check(&["cat", "/proc/vmstat"], SHORT)?;
    let mut lines = counters.lines();
    let made = lines.find_map(|line| line.strip_prefix("thp_file_alloc "));
    let made = made.context("no thp_file_alloc in /proc/vmstat")?;
    Ok(made.trim().parse()?)
}

/// Sets the host's setting to `always`, and restores the former value on drop.
struct Setting<'a> {
    host: &'a Host,
    before: Option<&'a str>,
}

impl<'a> Setting<'a> {
    /// Returns the current value; `None` on a kernel without this setting.
    fn now(host: &Host) -> anyhow::Result<Option<String>> {
        let output = host.run(&["cat", SETTING], SHORT)?;
        let chosen = output.stdout.split_once('[');
        let chosen = chosen.and_then(|(_, rest)| rest.split_once(']'));
        Ok(chosen.map(|(chosen, _)| chosen.to_owned()))
    }

    fn change(host: &'a Host, before: &'a str) -> anyhow::Result<Self> {
        // Created before the change, since that may fail half way.
        let setting = Self {
            host,
            before: Some(before),
        };
        write(host, "always")?;
        Ok(setting)
    }

    fn put_back(mut self) -> anyhow::Result<()> {
        self.before.take().map_or(Ok(()), |b| write(self.host, b))
    }
}

impl Drop for Setting<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            // Best effort: the scenario has failed already.
            let _ = write(self.host, before);
        }
    }
}

fn write(host: &Host, chosen: &str) -> anyhow::Result<()> {
    let script = format!("echo {chosen} > {SETTING}");
    host.check(&["sh", "-c", &script], SHORT)?;
    Ok(())
}
